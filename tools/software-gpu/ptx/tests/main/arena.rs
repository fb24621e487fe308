//! A memory of one allocation at a fixed address.
//!
//! It refuses addresses outside the allocation, and checks nothing else.

use software_gpu_ptx::{Memory, Refusal};

pub(crate) struct Arena {
    pub base: u64,
    pub bytes: Vec<u8>,
}

impl Arena {
    pub(crate) fn of(bytes: Vec<u8>) -> Arena {
        Arena { base: 0x7f00_0000_1000, bytes }
    }

    fn place(&self, address: u64, bytes: usize) -> Result<std::ops::Range<usize>, Refusal> {
        let at = address.wrapping_sub(self.base);
        let (end, length) = (at.saturating_add(bytes as u64), self.bytes.len() as u64);
        if end > length {
            let first = if at < length { self.base + length } else { address };
            return Err(Refusal { address: first, why: "beside every allocation".to_owned() });
        }
        Ok(at as usize..end as usize)
    }

    pub(crate) fn words(&self) -> Vec<u32> {
        self.bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
    }
}

impl Memory for Arena {
    fn load(&mut self, address: u64, into: &mut [u8]) -> Result<(), Refusal> {
        let place = self.place(address, into.len())?;
        into.copy_from_slice(&self.bytes[place]);
        Ok(())
    }

    fn store(&mut self, address: u64, from: &[u8]) -> Result<(), Refusal> {
        let place = self.place(address, from.len())?;
        self.bytes[place].copy_from_slice(from);
        Ok(())
    }

    fn update(
        &mut self,
        address: u64,
        bytes: usize,
        change: &mut dyn FnMut(u64) -> u64,
    ) -> Result<u64, Refusal> {
        let place = self.place(address, bytes)?;
        let mut whole = [0; 8];
        whole[..bytes].copy_from_slice(&self.bytes[place.clone()]);
        let old = u64::from_le_bytes(whole);
        self.bytes[place].copy_from_slice(&change(old).to_le_bytes()[..bytes]);
        Ok(old)
    }
}
