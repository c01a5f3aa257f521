//! The two ways to access configuration space, the ECAM and the ports CF8h and CFCh, with a changing topology.
//!
//! The devices are plain memory, so a read must return the last written value. The result of each access, of any size
//! and at any address, is predicted from the numbers alone: the device that reserves the function, and whether the
//! access is a configuration request.

use std::cell::RefCell;
use std::collections::BTreeMap;

use pci::{ConfigPorts, ConfigTarget, Dword, DwordWrite, Placement, Rid, Topology, VfPlacement, ecam_read, ecam_write};

use crate::input::{Input, Seed};

const LAST_BUS: u8 = 127;

// The kinds of operation.
const ECAM_READ: u8 = 0;
const ECAM_WRITE: u8 = 1;
const PORT_READ: u8 = 2;
const PORT_WRITE: u8 = 3;
const AGREE: u8 = 4;
const PLUG: u8 = 5;
const UNPLUG: u8 = 6;
const KINDS: u8 = 7;

/// A device that stores written values.
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

/// A device in the oracle: its functions, and the bytes written to them, by offset in the ECAM.
struct Plugged {
    placement: Placement,
    bytes: BTreeMap<u64, u8>,
}

impl Plugged {
    fn total_vfs(&self) -> u16 {
        self.placement.vfs.map_or(0, |vfs| vfs.total_vfs)
    }

    /// The routing ID of the PF (0) or of a VF, counted from 1.
    fn rid(&self, function: u16) -> u32 {
        let pf = u32::from(self.placement.rid.to_bits());
        match (function.checked_sub(1), self.placement.vfs) {
            (Some(vf), Some(vfs)) => pf + u32::from(vfs.first_vf_offset) + u32::from(vfs.vf_stride) * u32::from(vf),
            _ => pf,
        }
    }

    /// True if the device responds to accesses to this routing ID. A bus of VFs belongs to a single device as a whole.
    fn has(&self, rid: u32) -> bool {
        let total_vfs = self.total_vfs();
        rid == self.rid(0) || (total_vfs > 0 && (self.rid(1) >> 8..=self.rid(total_vfs) >> 8).contains(&(rid >> 8)))
    }
}

#[derive(Default)]
struct Oracle {
    devices: Vec<Plugged>,
    address: u32,
}

impl Oracle {
    /// The device at an access of `len` bytes at `offset` of the ECAM.
    fn target(&mut self, offset: u64, len: usize) -> Option<&mut Plugged> {
        let legal = matches!(len, 1 | 2 | 4) && offset.is_multiple_of(len as u64);
        let rid = u32::try_from(offset >> 12).ok().filter(|_| legal)?;
        self.devices.iter_mut().find(|device| device.has(rid))
    }

    fn read(&mut self, offset: u64, len: usize) -> Vec<u8> {
        match self.target(offset, len) {
            Some(device) => (offset..).take(len).map(|at| device.bytes.get(&at).copied().unwrap_or(0)).collect(),
            None => vec![0xff; len],
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        if let Some(device) = self.target(offset, data.len()) {
            device.bytes.extend((offset..).zip(data.iter().copied()));
        }
    }

    /// The ECAM offset of an access to the data port: the address register holds bus, device, function and dword.
    fn through_ports(&self, port: u64) -> Option<u64> {
        let [register, ..] = self.address.to_le_bytes();
        let rid = u64::from(self.address >> 8 & 0xffff);
        (self.address >> 31 == 1).then_some(rid << 12 | u64::from(register & 0xfc) | port & 3)
    }

    fn port_read(&mut self, port: u64, len: usize) -> Vec<u8> {
        match port {
            0 if len == 4 => self.address.to_le_bytes().into(),
            // An access that crosses the port's dword is not a configuration request.
            4..8 if port as usize % 4 + len <= 4 => {
                self.through_ports(port).map_or(vec![0xff; len], |offset| self.read(offset, len))
            }
            _ => vec![0xff; len],
        }
    }

    fn port_write(&mut self, port: u64, data: &[u8]) {
        match (port, data) {
            (0, &[a, b, c, d]) => self.address = u32::from_le_bytes([a, b, c, d]) & 0x80ff_fffc,
            (4..8, _) if port as usize % 4 + data.len() <= 4 => {
                if let Some(offset) = self.through_ports(port) {
                    self.write(offset, data);
                }
            }
            _ => {}
        }
    }

    /// The expected placement of a device: in `slot`, or else in the lowest free slot from 1, with the lowest free
    /// buses from 1.
    fn room(&self, slot: Option<u8>, total_vfs: u16) -> Option<Placement> {
        let has = |bus: u32, devfn: u32| self.devices.iter().any(|device| device.has(bus << 8 | devfn));
        let is_free = |slot: &u8| *slot < 32 && !has(0, u32::from(*slot) << 3);
        let slot = match slot {
            Some(slot) => Some(slot).filter(is_free),
            None => (1..32).find(is_free),
        };
        let rid = Rid::from_bus_devfn(0, slot? << 3);
        if total_vfs == 0 {
            return Some(Placement { segment: 0, rid, vfs: None });
        }
        let (needed, mut free) = (u32::from(total_vfs.div_ceil(256)), 0);
        let last = (1..=u32::from(LAST_BUS)).find(|bus| {
            free = if has(*bus, 0) { 0 } else { free + 1 };
            free == needed
        });
        let first_vf_offset = ((last? + 1 - needed) << 8) as u16 - rid.to_bits();
        let vfs = Some(VfPlacement { total_vfs, first_vf_offset, vf_stride: 1 });
        Some(Placement { segment: 0, rid, vfs })
    }

    /// An offset in the ECAM: in a function that exists, or anywhere.
    fn offset(&self, input: &mut Input<'_>) -> u64 {
        let (choice, function, register) = (input.u8(), input.u16(), input.u16());
        let known = usize::from(choice).checked_rem(self.devices.len()).map(|n| &self.devices[n]);
        match known.filter(|_| choice < 0xe0) {
            Some(device) => {
                u64::from(device.rid(function % (device.total_vfs() + 1))) << 12 | u64::from(register & 0xfff)
            }
            None if choice < 0xf0 => u64::from(function) << 12 | u64::from(register & 0xfff),
            None => (u64::from(function) << 16 | u64::from(register)).rotate_left(u32::from(choice & 0xf) * 4),
        }
    }
}

struct Pair {
    topology: Topology<Memory>,
    ports: ConfigPorts,
    oracle: Oracle,
}

impl Pair {
    fn apply(&mut self, input: &mut Input<'_>) {
        let Self { topology, ports, oracle } = self;
        let mut data = [0; 16];
        match input.u8() % KINDS {
            ECAM_READ => {
                let (offset, len) = (oracle.offset(input), usize::from(input.u8() % 17));
                ecam_read(topology, offset, &mut data[..len]);
                assert_eq!(data[..len], oracle.read(offset, len), "{len} bytes at {offset:#x}");
            }
            ECAM_WRITE => {
                let (offset, len) = (oracle.offset(input), usize::from(input.u8() % 17));
                data[..8].copy_from_slice(&input.array::<8>());
                ecam_write(topology, offset, &data[..len]);
                oracle.write(offset, &data[..len]);
            }
            PORT_READ => {
                let (port, len) = (u64::from(input.u8() % 12), usize::from(input.u8() % 17));
                ports.read(topology, port, &mut data[..len]);
                assert_eq!(data[..len], oracle.port_read(port, len), "{len} ports at {port:#x}");
            }
            PORT_WRITE => {
                let (port, len) = (u64::from(input.u8() % 12), usize::from(input.u8() % 17));
                data[..4].copy_from_slice(&input.array::<4>());
                ports.write(topology, port, &data[..len]);
                oracle.port_write(port, &data[..len]);
            }
            AGREE => {
                // Only offsets that the ports can reach: the first 256 bytes of each function.
                let offset = oracle.offset(input) & 0x0fff_f0ff;
                let address = 1 << 31 | (offset >> 4 & 0xff_ff00 | offset & 0xfc) as u32;
                ports.write(topology, 0, &address.to_le_bytes());
                oracle.port_write(0, &address.to_le_bytes());
                let len = [1, 2, 4][usize::from(input.u8() % 3)];
                let (mut by_port, mut by_ecam) = ([0; 4], [0; 4]);
                ports.read(topology, 4 + (offset & 3), &mut by_port[..len]);
                ecam_read(topology, offset, &mut by_ecam[..len]);
                assert_eq!(by_port, by_ecam, "{len} bytes at {offset:#x}");
            }
            PLUG => self.plug(input),
            UNPLUG => {
                let choice = usize::from(input.u8());
                let Some(n) = choice.checked_rem(oracle.devices.len()) else { return };
                let device = oracle.devices.swap_remove(n);
                assert!(topology.unplug(device.placement.rid).is_some());
                assert!(topology.unplug(device.placement.rid).is_none());
            }
            _ => {}
        }
    }

    fn plug(&mut self, input: &mut Input<'_>) {
        let Self { topology, oracle, .. } = self;
        let (slot, total_vfs) = (input.u8(), input.u16());
        let slot = (slot < 0xc0).then_some(slot % 34);
        // Mostly a few VFs, sometimes as many as fit a segment, or more.
        let total_vfs = if total_vfs & 0x8000 == 0 { total_vfs % 600 } else { total_vfs };
        let placement = topology.place(slot, total_vfs).ok();
        assert_eq!(placement, oracle.room(slot, total_vfs), "{slot:?}, {total_vfs} VFs");
        let Some(placement) = placement else { return };
        let new = Plugged { placement, bytes: BTreeMap::new() };
        for function in [0, 1, total_vfs].into_iter().filter(|function| *function <= total_vfs) {
            let rid = new.rid(function);
            assert!(!oracle.devices.iter().any(|device| device.has(rid)), "{rid:#x} belongs to another device");
            assert_eq!(rid >> 8 == 0, function == 0, "VFs have buses of their own");
            assert!(rid >> 8 <= u32::from(LAST_BUS));
        }
        for device in &oracle.devices {
            assert!(![0, 1, device.total_vfs()].into_iter().any(|function| new.has(device.rid(function))));
        }
        topology.plug(placement, Memory::default()).expect("a placed device can be plugged");
        oracle.devices.push(new);
    }
}

/// Runs the operations of `input`.
pub fn run(input: &[u8]) {
    run_to_end(input);
}

/// As [`run`]. Returns the number of bytes written to functions that exist.
fn run_to_end(input: &[u8]) -> usize {
    let mut input = Input::new(input);
    let mut pair = Pair { topology: Topology::new(LAST_BUS), ports: ConfigPorts::default(), oracle: Oracle::default() };
    while !input.is_empty() {
        pair.apply(&mut input);
    }
    pair.oracle.devices.iter().map(|device| device.bytes.len()).sum()
}

fn plug(seed: Seed, slot: u8, total_vfs: u16) -> Seed {
    seed.with([PLUG, slot]).with(total_vfs.to_le_bytes())
}

/// An access to a function of the n-th device: function 0 is its PF, 1 its first VF.
fn access(seed: Seed, kind: u8, device: u8, function: u16, register: u16) -> Seed {
    seed.with([kind, device]).with(function.to_le_bytes()).with(register.to_le_bytes())
}

/// A host bridge, a PF with 8 VFs, and one with 300 VFs on two buses.
fn machine() -> Seed {
    plug(plug(plug(Seed::new(), 0, 0), 3, 8), 0xff, 300)
}

/// Seeds: accesses to PFs and VFs both ways, odd sizes, a full topology, and a changing one.
pub fn seeds() -> Vec<Vec<u8>> {
    let write = |seed, device, function, register, len: u8| {
        access(seed, ECAM_WRITE, device, function, register).with([len, 1, 2, 3, 4, 5, 6, 7, 8])
    };
    let ecam = write(write(machine(), 1, 0, 0x104, 4), 2, 300, 0xfff, 1);
    let ecam = access(access(ecam, ECAM_READ, 1, 0, 0x104).with([4]), ECAM_READ, 2, 300, 0xffe).with([2]);
    let odd = [(0x10, 8), (0x11, 2), (0xffd, 4), (0x10, 0), (0x10, 3)];
    let odd = odd.into_iter().fold(machine(), |seed, (register, len)| write(seed, 1, 1, register, len));
    let anywhere = access(machine(), ECAM_READ, 0xff, 0x1800, 0).with([4]);
    let ports = machine().with([PORT_WRITE, 0, 4]).with(0x8000_1810u32.to_le_bytes());
    let ports = ports.with([PORT_WRITE, 6, 2, 0xcd, 0xab, 0, 0, PORT_READ, 7, 1, PORT_READ, 6, 4, PORT_READ, 0, 4]);
    let agree = access(write(machine(), 2, 5, 0x40, 4), AGREE, 2, 5, 0x41).with([0]);
    let full = (0..34).fold(Seed::new(), |seed, _| plug(seed, 0xff, 500));
    let again = plug(plug(machine().with([UNPLUG, 1]), 3, 256), 4, 32_600);
    [ecam, odd, anywhere, ports, agree, full, again].map(Seed::done).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_write_to_functions_that_exist() {
        let written: Vec<_> = seeds().iter().map(|seed| run_to_end(seed)).collect();
        assert_eq!(written, [5, 0, 0, 2, 4, 0, 0]);
    }
}
