//! Ethernet addresses.

/// An Ethernet address, its bytes in the order of the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// All stations.
    pub const BROADCAST: Self = Self([0xff; 6]);

    /// True for groups, including broadcast.
    pub const fn is_group(self) -> bool {
        self.0[0] & 1 != 0
    }

    /// The lower four bytes and the upper two, as in RAL and RAH.
    pub(crate) const fn to_registers(self) -> (u32, u32) {
        let [a, b, c, d, e, f] = self.0;
        (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, 0, 0]))
    }

    /// The address in RAL and RAH; the upper half of RAH is ignored.
    pub(crate) const fn from_registers(low: u32, high: u32) -> Self {
        let [a, b, c, d] = low.to_le_bytes();
        let [e, f, _, _] = high.to_le_bytes();
        Self([a, b, c, d, e, f])
    }

    /// The Device Serial Number of a function with this address: FFFFh between its halves (`Device Serial Number`).
    pub(crate) const fn serial_number(self) -> u64 {
        let [a, b, c, d, e, f] = self.0;
        u64::from_be_bytes([a, b, c, 0xff, 0xff, d, e, f])
    }

    /// The 12 bits by which MTA and UTA are indexed, for an offset from MCSTCTRL (`Multicast Table Array`).
    pub(crate) const fn hash(self, offset: u32) -> u16 {
        let [_, _, _, _, e, f] = self.0;
        let word = u16::from_le_bytes([e, f]);
        let shift = match offset & 3 {
            0 => 4,
            1 => 3,
            2 => 2,
            _ => 0,
        };
        (word >> shift) & 0xfff
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: Mac = Mac([0x52, 0x54, 0x00, 0x12, 0x34, 0x56]);

    #[test]
    fn registers_hold_an_address_in_the_order_of_the_wire() {
        assert_eq!(MAC.to_registers(), (0x1200_5452, 0x5634));
        assert_eq!(Mac::from_registers(0x1200_5452, 0x8000_5634), MAC);
        assert_eq!(MAC.serial_number(), 0x5254_00ff_ff12_3456);
    }

    #[test]
    fn each_hash_offset_takes_other_bits() {
        assert_eq!([0, 1, 2, 3].map(|offset| MAC.hash(offset)), [0x563, 0xac6, 0x58d, 0x634]);
    }

    #[test]
    fn the_first_bit_of_the_wire_marks_a_group() {
        assert!(!MAC.is_group() && Mac::BROADCAST.is_group() && Mac([1, 0, 0x5e, 0, 0, 1]).is_group());
    }
}
