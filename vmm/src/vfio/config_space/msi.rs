//! MSI: a device's capability in the guest (`PCIe 6.2 §7.7.1`). MSI-X is in the crate `pci`.

use pci::spec::capability_id;
use pci::{Dword, DwordWrite, Effects};

/// MSI Enable, in Message Control.
const ENABLE: u32 = 1 << 0;
/// Multiple Message Capable: the number of vectors that the device requests, as a power of two.
const CAPABLE: u32 = 0b111 << 1;
/// Multiple Message Enable: the number that it gets.
const ENABLED: u32 = 0b111 << 4;
/// The address has 64 bits.
const ADDRESS_64: u32 = 1 << 7;
/// Each vector has a mask bit.
const MASKABLE: u32 = 1 << 8;
/// The most vectors, as a power of two.
const MOST: u32 = 5;

/// Bytes of a capability with this Message Control.
pub(crate) fn len_of(control: u32) -> u16 {
    let base = if control & ADDRESS_64 != 0 { 14 } else { 10 };
    if control & MASKABLE == 0 { base } else { base / 4 * 4 + 12 }
}

/// The registers of the capability.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Msi {
    /// Read-only bits of Message Control.
    shape: u32,
    control: u32,
    address: u64,
    data: u32,
    mask: u32,
}

impl Msi {
    /// A disabled capability with the host's Message Control.
    pub(crate) fn new(control: u32) -> Self {
        let vectors = (control & CAPABLE) >> 1;
        let shape = control & (ADDRESS_64 | MASKABLE) | vectors.min(MOST) << 1;
        Self { shape, control: 0, address: 0, data: 0, mask: 0 }
    }

    /// True if MSI Enable is set.
    pub(crate) fn enabled(&self) -> bool {
        self.control & ENABLE != 0
    }

    /// The number of vectors that are enabled, 1 to 32.
    pub(crate) fn vectors(&self) -> u16 {
        let asked = (self.shape & CAPABLE) >> 1;
        1 << ((self.control & ENABLED) >> 4).min(asked)
    }

    /// The address and data of `vector`, if MSI is enabled and the vector is not masked.
    pub(crate) fn message(&self, vector: u16) -> Option<(u64, u32)> {
        let sends = self.enabled() && vector < self.vectors() && self.mask >> vector & 1 == 0;
        // The lowest bits of the data are the vector number.
        let data = self.data & !u32::from(self.vectors() - 1) | u32::from(vector);
        sends.then_some((self.address, data))
    }

    fn is_64(&self) -> bool {
        self.shape & ADDRESS_64 != 0
    }

    /// Field at the dword `reg` of the capability.
    fn field(&self, reg: Dword) -> Field {
        let has_mask = self.shape & MASKABLE != 0;
        match (reg.offset(), self.is_64()) {
            (0, _) => Field::Control,
            (4, _) => Field::Address,
            (8, true) => Field::UpperAddress,
            (8, false) | (12, true) => Field::Data,
            (12, false) | (16, true) if has_mask => Field::Mask,
            (16, false) | (20, true) if has_mask => Field::Pending,
            _ => Field::None,
        }
    }

    /// Reads the dword at `reg` from the start of the capability. The next pointer is 0. `pending` returns the pending
    /// bit of a vector.
    pub(crate) fn read(&self, reg: Dword, pending: impl Fn(u16) -> bool) -> u32 {
        let [low, high] = halves(self.address);
        match self.field(reg) {
            Field::Control => u32::from(capability_id::MSI) | (self.shape | self.control) << 16,
            Field::Address => low,
            Field::UpperAddress => high,
            Field::Data => self.data,
            Field::Mask => self.mask,
            Field::Pending => (0..self.vectors()).fold(0, |bits, n| bits | u32::from(pending(n)) << n),
            Field::None => 0,
        }
    }

    /// Writes the dword at `reg`.
    pub(crate) fn write(&mut self, reg: Dword, write: DwordWrite) -> Effects {
        let before = self.clone();
        match self.field(reg) {
            Field::Control => self.control = write.apply(self.control << 16, (ENABLE | ENABLED) << 16) >> 16,
            Field::Address => {
                let [low, _] = halves(self.address);
                self.address = self.address & !0xffff_ffff | u64::from(write.apply(low, !0b11));
            }
            Field::UpperAddress => {
                let [low, high] = halves(self.address);
                self.address = u64::from(write.apply(high, u32::MAX)) << 32 | u64::from(low);
            }
            Field::Data => self.data = write.apply(self.data, 0xffff),
            Field::Mask => self.mask = write.apply(self.mask, u32::MAX),
            Field::Pending | Field::None => {}
        }
        if *self == before { Effects::NONE } else { Effects::MESSAGES }
    }

    /// Returns to the state of power-on.
    pub(crate) fn reset(&mut self) {
        *self = Self { control: 0, address: 0, data: 0, mask: 0, ..*self };
    }
}

enum Field {
    Control,
    Address,
    UpperAddress,
    Data,
    Mask,
    Pending,
    None,
}

fn halves(address: u64) -> [u32; 2] {
    [address, address >> 32].map(|half| u32::try_from(half & 0xffff_ffff).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const WIDE: u32 = ADDRESS_64 | MASKABLE | 3 << 1;

    fn put(msi: &mut Msi, offset: u16, value: u32) -> bool {
        msi.write(Dword::containing(offset), DwordWrite::full(value)).messages
    }

    #[test]
    fn the_length_follows_from_the_control() {
        assert_eq!([0, ADDRESS_64, MASKABLE, ADDRESS_64 | MASKABLE].map(len_of), [10, 14, 20, 24]);
    }

    #[test]
    fn a_vector_is_in_the_lowest_bits_of_the_data_and_can_be_masked() {
        let mut msi = Msi::new(WIDE);
        assert_eq!((msi.vectors(), msi.message(0)), (1, None));
        assert!(put(&mut msi, 4, 0xfee0_1003) && put(&mut msi, 8, 1) && put(&mut msi, 12, 0xffff_4247));
        assert!(put(&mut msi, 0, (ENABLE | 2 << 4) << 16) && !put(&mut msi, 0, (ENABLE | 2 << 4) << 16));
        assert_eq!(
            (msi.vectors(), msi.message(0), msi.message(3)),
            (4, Some((0x1_fee0_1000, 0x4244)), Some((0x1_fee0_1000, 0x4247)))
        );
        assert_eq!(msi.message(4), None, "it is not enabled");
        assert!(put(&mut msi, 16, 1 << 3));
        assert_eq!((msi.message(3), msi.read(Dword::containing(20), |n| n == 3)), (None, 1 << 3));
        assert_eq!(msi.read(Dword::containing(0), |_| false) >> 16, WIDE | ENABLE | 2 << 4);
        msi.reset();
        assert_eq!(msi, Msi::new(WIDE));
    }

    #[test]
    fn no_more_vectors_are_enabled_than_the_device_has() {
        let mut msi = Msi::new(1 << 1);
        put(&mut msi, 0, u32::MAX);
        assert_eq!(msi.vectors(), 2);
        assert!(!put(&mut msi, 12, u32::MAX), "it has no masks");
        let most = Msi::new(7 << 1);
        assert_eq!(most.read(Dword::containing(0), |_| false) >> 17 & 0b111, MOST);
    }
}
