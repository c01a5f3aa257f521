//! Configuration access, decoded once.
//!
//! Software reads and writes configuration space in 1, 2 or 4 bytes at natural alignment. Here an access becomes a
//! dword number and byte enables, as on the wire (`PCIe 6.2 §2.2.5`), so that every register has one read and one
//! write.

/// The number of a dword of a function's configuration space, 0 to 1023.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Dword(u16);

impl Dword {
    /// Dwords in a function's configuration space (4 KiB).
    pub const COUNT: u16 = 1024;

    /// The dword that holds byte `offset`; offsets wrap at 4 KiB.
    pub const fn containing(offset: u16) -> Self {
        Self((offset & 0xfff) >> 2)
    }

    /// The byte offset of the dword, 0 to 0xffc.
    pub const fn offset(self) -> u16 {
        self.0 << 2
    }

    /// All dwords of a configuration space in order.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..Self::COUNT).map(Self)
    }
}

/// The data of a write to one dword: a value and which of its bytes are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DwordWrite {
    value: u32,
    mask: u32,
}

impl DwordWrite {
    /// A write of all four bytes.
    pub const fn full(value: u32) -> Self {
        Self { value, mask: u32::MAX }
    }

    /// A write of the bytes whose bits are set in `enables` (bit 0: byte 0); higher bits of `enables` are ignored.
    pub const fn new(value: u32, enables: u8) -> Self {
        let mut mask = 0;
        let mut byte = 0;
        while byte < 4 {
            if enables >> byte & 1 == 1 {
                mask |= 0xff << (8 * byte);
            }
            byte += 1;
        }
        Self { value: value & mask, mask }
    }

    /// The written bits; bits of other bytes are 0.
    pub const fn value(self) -> u32 {
        self.value & self.mask
    }

    /// All bits of the written bytes.
    pub const fn mask(self) -> u32 {
        self.mask
    }

    /// `old` with the written bytes replaced where `writable` has bits.
    #[must_use]
    pub const fn apply(self, old: u32, writable: u32) -> u32 {
        let mask = self.mask & writable;
        old & !mask | self.value & mask
    }
}

/// A configuration access of 1, 2 or 4 bytes that stays within one dword.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access {
    dword: Dword,
    first: u8,
    len: u8,
}

impl Access {
    /// The access of `len` bytes at byte `offset` of a configuration space.
    ///
    /// `None` if no root complex makes a single configuration request of it: a length that is not 1, 2 or 4, an offset
    /// that is not aligned to the length, or one beyond 4 KiB.
    pub fn decode(offset: u64, len: usize) -> Option<Self> {
        let offset = u16::try_from(offset).ok().filter(|offset| *offset < 0x1000)?;
        let len = u8::try_from(len).ok().filter(|len| matches!(len, 1 | 2 | 4))?;
        if offset % u16::from(len) != 0 {
            return None;
        }
        let [first, _] = (offset & 3).to_le_bytes();
        Some(Self { dword: Dword::containing(offset), first, len })
    }

    /// The dword that is accessed.
    pub const fn dword(self) -> Dword {
        self.dword
    }

    /// Copies the accessed bytes of the dword's `value` to `data`. Leaves bytes beyond the access unchanged.
    pub fn extract(self, value: u32, data: &mut [u8]) {
        let bytes = value.to_le_bytes();
        for (to, from) in data.iter_mut().zip(bytes.iter().skip(usize::from(self.first)).take(usize::from(self.len))) {
            *to = *from;
        }
    }

    /// The write of `data` that this access makes.
    pub fn write(self, data: &[u8]) -> DwordWrite {
        let mut bytes = [0; 4];
        for (to, from) in bytes.iter_mut().skip(usize::from(self.first)).zip(data.iter().take(usize::from(self.len))) {
            *to = *from;
        }
        let enables = (1u8 << self.len) - 1;
        DwordWrite::new(u32::from_le_bytes(bytes), enables << self.first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_aligned_accesses_of_1_2_and_4_bytes_decode() {
        for len in 0..=9 {
            for offset in 0..8 {
                let legal = matches!(len, 1 | 2 | 4) && offset % len == 0;
                assert_eq!(Access::decode(offset as u64, len).is_some(), legal, "{len} bytes at {offset}");
            }
        }
        assert!(Access::decode(0xffc, 4).is_some());
        assert!(Access::decode(0x1000, 1).is_none());
        assert!(Access::decode(u64::MAX, 1).is_none());
    }

    #[test]
    fn a_read_takes_its_bytes_of_the_dword() {
        let mut data = [0; 2];
        Access::decode(6, 2).unwrap().extract(0x4433_2211, &mut data);
        assert_eq!(data, [0x33, 0x44]);
    }

    #[test]
    fn a_write_changes_its_bytes_only() {
        let access = Access::decode(9, 1).unwrap();
        assert_eq!(access.dword().offset(), 8);
        assert_eq!(access.write(&[0xab]).apply(0x4433_2211, u32::MAX), 0x4433_ab11);
        assert_eq!(access.write(&[0xab]).apply(0x4433_2211, 0x0000_0f00), 0x4433_2b11);
    }
}
