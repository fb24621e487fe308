//! The caller's tensors at other addresses: arguments change on the host, and tables of tiles on the optim stream.
//!
//! Nothing waits for the launches that read the old addresses: they have their arguments, and the stream orders the tables.

use super::CudaDevice;
use super::driver::Entered;
use super::tile_tables::{MovingTiles, StagedTiles};
use crate::abi::InstepTile;
use crate::error::Result;
use crate::handle::Place;
use crate::launch::{BorrowedPieces, Kind, Launch, Piece, refuse_other_places};
use crate::op::{Memory, Stream};

impl CudaDevice {
    /// Takes the caller's tensors at other addresses.
    pub(super) fn take_addresses(&mut self, pieces: BorrowedPieces) -> Result<()> {
        let regions = &self.engine.memory.regions;
        let mut moved: Vec<&Piece> = regions.moved(Memory::Params, &pieces.params).collect();
        let moves_params = !moved.is_empty();
        moved.extend(regions.moved(Memory::Grads, &pieces.grads));
        if moved.is_empty() {
            return Ok(());
        }
        self.refuse_unreached(moved)?;
        // Before anything changes, because it may fail.
        let staged = (moves_params && self.moving.is_none()).then(|| self.staged_tiles()).transpose()?;
        self.guarded("new addresses", |device| {
            device.bindings += 1;
            device.engine.memory.regions.rebind(pieces);
            let (plan, regions) = (&device.plan, &device.engine.memory.regions);
            for (kind, launches) in [(Kind::Norm, &mut device.norms), (Kind::Step, &mut device.steps)] {
                launches.iter_mut().flatten().for_each(|launch| launch.rebind(kind, plan, regions));
            }
            if moves_params { device.move_tiles(staged) } else { Ok(()) }
        })
    }

    /// Refuses tensors that begin or end outside this GPU's memory.
    pub(super) fn refuse_unreached<'a>(&self, pieces: impl IntoIterator<Item = &'a Piece>) -> Result<()> {
        let _entered = Entered::new(&*self.driver)?;
        let place = Place::Cuda(self.driver.ordinal());
        refuse_other_places(pieces, place, |address| self.driver.inspect_memory(address))
    }

    /// Room for the tiles of all steps.
    fn staged_tiles(&self) -> Result<StagedTiles> {
        let _entered = Entered::new(&*self.driver)?;
        StagedTiles::new(&self.driver, self.steps.iter().flatten().map(|launch| launch.tile_count()).sum())
    }

    /// Sends the tiles that have changed; all of them, if `staged` is there to begin with.
    fn move_tiles(&mut self, staged: Option<StagedTiles>) -> Result<()> {
        let stream = self.streams.stream(Stream::Optim);
        let is_first = staged.is_some();
        if let Some(staged) = staged {
            *self.moving = Some(MovingTiles { lists: self.all_tiles(), staged });
        }
        let Some(moving) = &mut *self.moving else { return Ok(()) };
        moving.follow(&self.steps, (&self.plan, &self.engine.memory.regions), is_first, stream)
    }

    /// Computes the tiles of all steps once more: a device keeps none if its parameters never move.
    fn all_tiles(&self) -> Vec<Vec<InstepTile>> {
        let (plan, regions) = (&self.plan, &self.engine.memory.regions);
        let inputs = (&self.constants, &*self.assignment);
        let buckets = 0..plan.buckets().len() as u32;
        let launches = buckets.flat_map(|bucket| Launch::all(Kind::Step, bucket, plan, regions, inputs));
        launches.map(|launch| launch.tiles).collect()
    }
}
