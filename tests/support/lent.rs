//! A caller's tensors on the host or on a GPU, which move and change buckets between passes.
//!
//! Each tensor lies between guard bands. A tensor that has moved is overwritten and freed at once, so a launch that
//! still used it would change bits, or fault under a sanitizer.

use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::Arc;

use instep::cuda::Cuda;
use instep::cuda::driver::Driver;
use instep::{
    Borrowed, DType, Device, DevicePtr, ForeignBucket, Layout, ParamId, Precision, Result, Stepper,
    StreamHandle, bf16, f16,
};

use crate::support::hardware;
use crate::support::stand_in::COMPUTE;

const BAND: usize = 64;
const GUARD: u8 = 0xa5;

/// SplitMix64: the same numbers on any machine.
pub(crate) struct Random(pub u64);

impl Random {
    /// Returns a number below `end`.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) % end as u64) as usize
    }

    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        (1..items.len()).rev().for_each(|k| items.swap(k, self.below(k + 1)));
    }
}

/// The memory in which tensors lie.
#[derive(Clone)]
pub(crate) enum Ground {
    Host,
    Gpu(Arc<dyn Driver>),
}

impl Ground {
    pub(crate) fn of(cuda: &Cuda) -> Ground {
        Ground::Gpu(Arc::clone(cuda.driver()))
    }
}

/// Returns the stream that fills and reads tensors on a GPU.
pub(crate) fn stream() -> StreamHandle {
    if hardware::is_required() { StreamHandle::default() } else { COMPUTE }
}

/// Bytes between bands.
pub(crate) struct Tensor {
    ground: Ground,
    first: usize,
    before: usize,
    bytes: usize,
}

impl Tensor {
    /// Allocates a tensor that starts `offset` bytes after a boundary of the allocation.
    pub(crate) fn new(ground: &Ground, bytes: usize, offset: usize) -> Tensor {
        let (before, whole) = (BAND + offset, bytes + 2 * BAND + offset);
        let first = match ground {
            Ground::Host => {
                let words = Box::into_raw(vec![0u64; whole.div_ceil(8)].into_boxed_slice());
                words.cast::<u64>().expose_provenance()
            }
            Ground::Gpu(driver) => {
                hardware::entered(&**driver, |driver| driver.allocate(whole as u64, stream())).0 as usize
            }
        };
        let tensor = Tensor { ground: ground.clone(), first, before, bytes };
        tensor.put(0, &vec![GUARD; whole]);
        tensor
    }

    fn whole(&self) -> usize {
        self.before + self.bytes + BAND
    }

    fn put(&self, at: usize, bytes: &[u8]) {
        match &self.ground {
            // SAFETY: inside the allocation, which no launch touches now.
            Ground::Host => unsafe {
                let to = with_exposed_provenance_mut::<u8>(self.first + at);
                to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            },
            Ground::Gpu(driver) => hardware::entered(&**driver, |driver| {
                // SAFETY: as above.
                unsafe { driver.upload(DevicePtr((self.first + at) as u64), bytes, stream()) }
            }),
        }
    }

    fn get(&self, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        match &self.ground {
            // SAFETY: as in `put`.
            Ground::Host => unsafe {
                let from = with_exposed_provenance::<u8>(self.first + at);
                bytes.as_mut_ptr().copy_from_nonoverlapping(from, len);
            },
            Ground::Gpu(driver) => hardware::entered(&**driver, |driver| {
                // SAFETY: as in `put`.
                unsafe { driver.download(&mut bytes, DevicePtr((self.first + at) as u64), stream()) }
            }),
        }
        bytes
    }

    pub(crate) fn assert_bands_stand(&self) {
        let end = self.before + self.bytes;
        let bands = [self.get(0, self.before), self.get(end, BAND)].concat();
        assert!(bands.iter().all(|byte| *byte == GUARD), "a tensor was written around");
    }

    /// Replaces the values.
    pub(crate) fn write(&self, values: &[u8]) {
        assert_eq!(values.len(), self.bytes);
        self.put(self.before, values);
    }

    pub(crate) fn read(&self) -> Vec<u8> {
        self.get(self.before, self.bytes)
    }

    pub(crate) fn address(&self) -> *mut u8 {
        with_exposed_provenance_mut(self.first + self.before)
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        self.put(0, &vec![0xff; self.whole()]);
        match &self.ground {
            // SAFETY: allocated in `new` with this length.
            Ground::Host => unsafe {
                let words = with_exposed_provenance_mut::<u64>(self.first);
                let words = std::ptr::slice_from_raw_parts_mut(words, self.whole().div_ceil(8));
                drop(Box::from_raw(words));
            },
            Ground::Gpu(driver) => hardware::entered(&**driver, |driver| {
                // SAFETY: the stepper has let go of it, or was closed.
                unsafe { driver.free(DevicePtr(self.first as u64), stream()) };
                Ok(())
            }),
        }
    }
}

/// All tensors that a stepper borrows.
pub(crate) struct Lent {
    ground: Ground,
    layout: Layout,
    precision: Precision,
    params: Vec<Tensor>,
    buckets: Vec<Bucket>,
}

struct Bucket {
    tensor: Tensor,
    len: usize,
    /// Registration index and offset.
    gradients: Vec<(usize, usize)>,
}

impl Lent {
    pub(crate) fn new(ground: Ground, layout: &Layout, precision: Precision, random: &mut Random) -> Lent {
        let (layout, params, buckets) = (layout.clone(), Vec::new(), Vec::new());
        let mut lent = Lent { ground, layout, precision, params, buckets };
        lent.params = (0..lent.layout.ids().count()).map(|param| lent.param(param, random)).collect();
        lent.buckets = lent.cut(random);
        lent
    }

    fn ids(&self) -> Vec<ParamId> {
        self.layout.ids().collect()
    }

    fn len(&self, param: usize) -> usize {
        self.layout.parameter(self.ids()[param]).unwrap().len as usize
    }

    fn param(&self, param: usize, random: &mut Random) -> Tensor {
        let bytes = self.precision.param.bytes() as usize;
        Tensor::new(&self.ground, self.len(param) * bytes, random.below(16) * bytes)
    }

    fn bucket(&self, len: usize, gradients: Vec<(usize, usize)>, random: &mut Random) -> Bucket {
        let bytes = self.precision.grad.bytes() as usize;
        Bucket { tensor: Tensor::new(&self.ground, len * bytes, random.below(16) * bytes), len, gradients }
    }

    /// Makes buckets of up to four parameters, in any order, with gaps.
    fn cut(&self, random: &mut Random) -> Vec<Bucket> {
        let mut order: Vec<usize> = (0..self.params.len()).collect();
        random.shuffle(&mut order);
        let (mut rest, mut buckets) = (&order[..], Vec::new());
        while !rest.is_empty() {
            let (members, others) = rest.split_at(rest.len().min(1 + random.below(4)));
            rest = others;
            let (mut next, mut gradients) = (random.below(3), Vec::new());
            for param in members {
                gradients.push((*param, next));
                next += self.len(*param) + random.below(3);
            }
            buckets.push(self.bucket(next, gradients, random));
        }
        buckets
    }

    fn lend_params(&self, memory: Borrowed, params: impl IntoIterator<Item = usize>) -> Borrowed {
        params.into_iter().fold(memory, |memory, param| {
            let (id, at) = (self.ids()[param], self.params[param].address());
            match self.precision.param {
                DType::F16 => memory.param::<f16>(id, at.cast()),
                DType::BF16 => memory.param::<bf16>(id, at.cast()),
                _ => memory.param::<f32>(id, at.cast()),
            }
        })
    }

    fn lend_buckets(&self, memory: Borrowed) -> Borrowed {
        let ids = self.ids();
        self.buckets.iter().fold(memory, |memory, Bucket { tensor, len, gradients }| {
            let described = ForeignBucket::new(*len);
            let described = gradients.iter().fold(described, |b, (param, at)| b.gradient(ids[*param], *at));
            match self.precision.grad {
                DType::F16 => memory.bucket::<f16>(described, tensor.address().cast()),
                DType::BF16 => memory.bucket::<bf16>(described, tensor.address().cast()),
                _ => memory.bucket::<f32>(described, tensor.address().cast()),
            }
        })
    }

    /// Lends all tensors.
    pub(crate) fn lend(&self) -> Borrowed {
        self.lend_buckets(self.lend_params(Borrowed::new(), 0..self.params.len()))
    }

    /// Moves some parameters; buckets stay, move, or are rebuilt. The contents move along, and the old memory is freed.
    /// Returns whether buckets were rebuilt.
    pub(crate) fn move_some<D: Device>(
        &mut self,
        stepper: &mut Stepper<D>,
        random: &mut Random,
    ) -> Result<bool> {
        stepper.status()?;
        let are_params_moved = random.below(3) > 0;
        let chosen: Vec<usize> =
            (0..self.params.len()).filter(|_| are_params_moved && random.below(2) == 0).collect();
        let mut left = Vec::new();
        for param in &chosen {
            let moved = self.param(*param, random);
            moved.put(moved.before, &self.params[*param].get(self.params[*param].before, moved.bytes));
            left.push(std::mem::replace(&mut self.params[*param], moved));
        }
        let mut memory = self.lend_params(Borrowed::new(), chosen);
        let buckets = match random.below(3) {
            0 => None,
            1 => {
                let same = |bucket: &Bucket| self.bucket(bucket.len, bucket.gradients.clone(), random);
                Some(self.buckets.iter().map(same).collect())
            }
            _ => Some(self.cut(random)),
        };
        if let Some(buckets) = buckets {
            let old = std::mem::replace(&mut self.buckets, buckets);
            self.copy_gradients(&old);
            left.extend(old.into_iter().map(|bucket| bucket.tensor));
            memory = self.lend_buckets(memory);
        }
        // SAFETY: the new tensors hold what the old ones held, which live until this returns.
        let are_others = unsafe { stepper.rebind(memory)? };
        left.iter().for_each(Tensor::assert_bands_stand);
        Ok(are_others)
    }

    fn copy_gradients(&self, from: &[Bucket]) {
        let bytes = self.precision.grad.bytes() as usize;
        for param in 0..self.params.len() {
            let place = |buckets: &[Bucket]| {
                let mut found = buckets.iter().enumerate().filter_map(|(k, bucket)| {
                    let (_, at) = bucket.gradients.iter().find(|(of, _)| *of == param)?;
                    Some((k, bucket.tensor.before + at * bytes))
                });
                found.next().unwrap()
            };
            let ((old, from_at), (new, to_at)) = (place(from), place(&self.buckets));
            let values = from[old].tensor.get(from_at, self.len(param) * bytes);
            self.buckets[new].tensor.put(to_at, &values);
        }
    }

    pub(crate) fn assert_bands_stand(&self) {
        let buckets = self.buckets.iter().map(|bucket| &bucket.tensor);
        self.params.iter().chain(buckets).for_each(Tensor::assert_bands_stand);
    }
}
