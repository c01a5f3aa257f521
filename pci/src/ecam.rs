//! The two ways to reach configuration space: ECAM (`PCIe 6.2 §7.2.2`) and ports CF8h and CFCh (`PCI 3.0 §3.2.2.3.2`).
//!
//! If possible, give a directly booted guest only ECAM: Linux would use the ports for every register below 256, at two
//! exits per access.

use std::rc::Rc;
use std::sync::Arc;

use crate::spec::ALL_ONES;
use crate::{Access, Dword, DwordWrite, Rid, Topology};

/// A device of a topology, as a target of accesses, behind a lock of its owner's choice.
pub trait ConfigTarget {
    /// See [`Device::config_read`](crate::Device::config_read).
    fn config_read(&self, rid: Rid, reg: Dword) -> u32;

    /// See [`Device::config_write`](crate::Device::config_write). The target applies the effects before it returns.
    fn config_write(&self, rid: Rid, reg: Dword, write: DwordWrite);
}

/// Makes pointers to a target targets, which their owner could not: the trait and the pointer are of other crates.
macro_rules! pointers {
    ($($pointer:ty),*) => {$(
        impl<T: ConfigTarget + ?Sized> ConfigTarget for $pointer {
            fn config_read(&self, rid: Rid, reg: Dword) -> u32 {
                (**self).config_read(rid, reg)
            }

            fn config_write(&self, rid: Rid, reg: Dword, write: DwordWrite) {
                (**self).config_write(rid, reg, write);
            }
        }
    )*};
}
pointers!(&T, Box<T>, Rc<T>, Arc<T>);

/// The address part of one bus in ECAM.
pub const ECAM_BUS_LEN: u64 = 1 << 20;

/// Decodes an access of `len` bytes at byte `offset` of a segment's ECAM. `None` for odd sizes, unaligned accesses, and
/// addresses beyond bus 255.
fn decode(offset: u64, len: usize) -> Option<(Rid, Access)> {
    let rid = Rid::from_bits(u16::try_from(offset >> 12).ok()?);
    Some((rid, Access::decode(offset & 0xfff, len)?))
}

fn read<D: ConfigTarget>(topology: &Topology<D>, request: Option<(Rid, Access)>, data: &mut [u8]) {
    data.fill(0xff);
    if let Some((rid, access)) = request {
        let value = topology.lookup(rid).map_or(ALL_ONES, |device| device.config_read(rid, access.dword()));
        access.extract(value, data);
    }
}

fn write<D: ConfigTarget>(topology: &Topology<D>, request: Option<(Rid, Access)>, data: &[u8]) {
    let device = request.and_then(|(rid, access)| Some((topology.lookup(rid)?, rid, access)));
    if let Some((device, rid, access)) = device {
        device.config_write(rid, access.dword(), access.write(data));
    }
}

/// Reads `data.len()` bytes at byte `offset` of the ECAM. Without a function at the address, they read all-ones.
pub fn ecam_read<D: ConfigTarget>(topology: &Topology<D>, offset: u64, data: &mut [u8]) {
    read(topology, decode(offset, data.len()), data);
}

/// Writes `data` at byte `offset` of the ECAM. Without a function at the address, the write is dropped.
pub fn ecam_write<D: ConfigTarget>(topology: &Topology<D>, offset: u64, data: &[u8]) {
    write(topology, decode(offset, data.len()), data);
}

/// The ports CF8h (address) and CFCh (data) of segment 0: the first 256 bytes of each function.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ConfigPorts {
    address: u32,
}

impl ConfigPorts {
    /// The first port.
    pub const BASE: u16 = 0xcf8;
    /// The number of ports.
    pub const LEN: u16 = 8;

    const ENABLE: u32 = 1 << 31;
    const ADDRESS_WRITABLE: u32 = 0x80ff_fffc;

    /// The configuration request of an access of `len` bytes at port `CFCh + offset`.
    fn request(&self, offset: u64, len: usize) -> Option<(Rid, Access)> {
        let [register, devfn, bus, _] = self.address.to_le_bytes();
        let access = Access::decode(u64::from(register) + offset, len)?;
        (self.address & Self::ENABLE != 0).then_some((Rid::from_bus_devfn(bus, devfn), access))
    }

    /// Reads `data.len()` bytes at port `CF8h + offset`.
    pub fn read<D: ConfigTarget>(&self, topology: &Topology<D>, offset: u64, data: &mut [u8]) {
        match offset {
            0 if data.len() == 4 => data.copy_from_slice(&self.address.to_le_bytes()),
            4..8 => read(topology, self.request(offset - 4, data.len()), data),
            _ => data.fill(0xff),
        }
    }

    /// Writes `data` at port `CF8h + offset`.
    pub fn write<D: ConfigTarget>(&mut self, topology: &Topology<D>, offset: u64, data: &[u8]) {
        match (offset, data.try_into().map(u32::from_le_bytes)) {
            (0, Ok(address)) => self.address = address & Self::ADDRESS_WRITABLE,
            (4..8, _) => write(topology, self.request(offset - 4, data.len()), data),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeMap;

    use super::*;

    /// Stores each written value.
    #[derive(Default)]
    struct Memory(RefCell<BTreeMap<(Rid, Dword), u32>>);

    impl ConfigTarget for Memory {
        fn config_read(&self, rid: Rid, reg: Dword) -> u32 {
            self.0.borrow().get(&(rid, reg)).copied().unwrap_or(0)
        }

        fn config_write(&self, rid: Rid, reg: Dword, write: DwordWrite) {
            let old = self.config_read(rid, reg);
            self.0.borrow_mut().insert((rid, reg), write.apply(old, u32::MAX));
        }
    }

    fn topology() -> (Topology<Rc<Memory>>, Rc<Memory>) {
        let memory = Rc::new(Memory::default());
        let mut topology = Topology::new(127);
        let placement = topology.place(Some(3), 300).unwrap();
        topology.plug(placement, memory.clone()).unwrap();
        (topology, memory)
    }

    fn ecam(rid: &str, offset: u64) -> u64 {
        let rid = format!("0000:{rid}").parse::<crate::Bdf>().unwrap().rid;
        u64::from(rid.to_bits()) << 12 | offset
    }

    fn ecam_get<const N: usize>(topology: &Topology<Rc<Memory>>, offset: u64) -> [u8; N] {
        let mut data = [0; N];
        ecam_read(topology, offset, &mut data);
        data
    }

    #[test]
    fn ecam_reaches_every_function_of_every_bus() {
        let (topology, _) = topology();
        for rid in ["00:03.0", "01:00.0", "01:1f.7", "02:05.3"] {
            ecam_write(&topology, ecam(rid, 0xffe), &[0x12, 0x34]);
            assert_eq!(ecam_get(&topology, ecam(rid, 0xffc)), [0, 0, 0x12, 0x34]);
        }
        assert_eq!(ecam_get(&topology, ecam("00:03.0", 0xffe)), [0x12, 0x34]);
    }

    #[test]
    fn absent_functions_and_odd_accesses_read_ones_and_drop_writes() {
        let (topology, memory) = topology();
        let absent = [ecam("00:03.1", 0), ecam("00:02.0", 0), ecam("7f:00.0", 0), 1 << 28, u64::MAX - 3];
        let odd = [ecam("00:03.0", 1), ecam("00:03.0", 2)];
        for offset in absent.into_iter().chain(odd) {
            ecam_write(&topology, offset, &[0; 4]);
            assert_eq!(ecam_get(&topology, offset), [0xff; 4], "{offset:#x}");
        }
        ecam_write(&topology, ecam("00:03.0", 0), &[0; 8]);
        assert_eq!(ecam_get(&topology, ecam("00:03.0", 0)), [0xff; 8]);
        assert_eq!(ecam_get(&topology, ecam("00:03.0", 0)), [0xff; 3]);
        ecam_read(&topology, ecam("00:03.0", 0), &mut []);
        assert!(memory.0.borrow().is_empty());
    }

    /// G23: both ways to configuration space.
    #[test]
    fn the_ports_and_ecam_agree() {
        let (topology, _) = topology();
        let mut ports = ConfigPorts::default();
        for (rid, offset) in [("00:03.0", 0x40), ("01:00.1", 0x04), ("01:1f.7", 0xfc), ("02:05.3", 0x3c)] {
            let address = 1 << 31 | u32::try_from(ecam(rid, 0) >> 4).unwrap() | offset;
            ports.write(&topology, 0, &address.to_le_bytes());
            ports.write(&topology, 4 + 2, &[0xcd, 0xab]);
            assert_eq!(ecam_get(&topology, ecam(rid, offset.into())), [0, 0, 0xcd, 0xab]);
            let mut data = [0; 1];
            ports.read(&topology, 4 + 3, &mut data);
            assert_eq!(data, [0xab]);
        }
        assert_eq!(ecam_get(&topology, ecam("01:00.0", 4)), [0; 4]);
    }

    #[test]
    fn a_shared_target_is_the_target() {
        struct Last(std::sync::atomic::AtomicU32);
        impl ConfigTarget for Last {
            fn config_read(&self, _rid: Rid, _reg: Dword) -> u32 {
                self.0.load(std::sync::atomic::Ordering::Relaxed)
            }

            fn config_write(&self, _rid: Rid, _reg: Dword, write: DwordWrite) {
                self.0.store(write.value(), std::sync::atomic::Ordering::Relaxed);
            }
        }
        let last = Arc::new(Last(0.into()));
        let mut topology = Topology::new(0);
        topology.plug(topology.place(Some(3), 0).unwrap(), Arc::clone(&last)).unwrap();
        ecam_write(&topology, ecam("00:03.0", 8), &[1, 2, 3, 4]);
        let mut data = [0; 2];
        ecam_read(&topology, ecam("00:03.0", 2), &mut data);
        assert_eq!((data, last.0.load(std::sync::atomic::Ordering::Relaxed)), ([3, 4], 0x0403_0201));
    }

    #[test]
    fn the_ports_need_their_enable_bit_and_a_whole_address() {
        let (topology, _) = topology();
        let mut ports = ConfigPorts::default();
        ports.write(&topology, 0, &0x1800u32.to_le_bytes());
        let mut data = [0; 4];
        ports.read(&topology, 4, &mut data);
        assert_eq!(data, [0xff; 4]);
        ports.write(&topology, 0, &[0xff]);
        ports.read(&topology, 0, &mut data);
        assert_eq!(data, 0x1800u32.to_le_bytes());
        for offset in 0..10 {
            for len in 0..9 {
                ports.write(&topology, offset, &vec![0xff; len]);
                ports.read(&topology, offset, &mut vec![0; len]);
            }
        }
    }
}
