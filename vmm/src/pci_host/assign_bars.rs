//! Gives each BAR an address before a guest runs, in place of the platform's firmware.
//!
//! This uses configuration accesses only, as firmware would, so that it works for every kind of device. VF BARs get
//! room for all reserved VFs (`PCIe 6.2 §9.3.3.14.1`). Linux keeps these addresses.
//!
//! A guest that is firmware gets more, like a boot loader on hardware: see [`hand_over`].

use std::ops::Range;

use pci::spec::{bar, command, extended_capability_id, header, sriov};
use pci::{ConfigTarget, Rid, Topology, ecam_read, ecam_write};

use crate::pci_layout::Apertures;

/// The base class of mass storage (`PCI Code and ID Assignment 1.11 §1.2`).
const MASS_STORAGE: u32 = 0x01;
/// The vendor of virtio devices (`virtio 1.4 §4.1.2`).
const VIRTIO_VENDOR: u32 = 0x1af4;
/// The largest 64-bit BAR of a boot device that is placed below 4 GiB. Larger ones would take that space from BARs that
/// cannot lie elsewhere; all BARs of 31 devices are at most 93 MiB.
const LOW_MAX: u64 = 1 << 20;

/// The BARs need more addresses than there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the PCI devices of a segment need more than its MMIO addresses; reserve fewer VFs, or give it more weight")]
pub struct NoRoom;

/// Gives each BAR of the devices on a root bus an address of its own, and enables the boot devices, as the platform's
/// firmware does for a boot loader. Only a guest that stands in for firmware, such as rust-hypervisor-firmware, gets
/// this state.
///
/// - The 64-bit BARs of mass storage lie below 4 GiB: a loader may map no more than that.
/// - Memory Space and Bus Master are set in virtio disks, as PCI lets firmware choose the devices to enable
///   (`PCI Firmware 3.3 §3.5`). Other vendors' disks belong to the host, and some of them cannot be reset: only the
///   guest's driver knows when they may write to memory.
/// - Disks come last, so that they take no low address that another BAR needs.
/// - A BAR without room stays 0, and its function disabled: firmware that places BARs itself may find room.
/// - VF BARs stay 0. edk2 moves BARs, but not VF BARs, which would then lie over BARs of other devices.
pub(crate) fn hand_over<D: ConfigTarget>(topology: &Topology<D>, root: u8, mut free: Apertures) {
    let functions = on_root(topology, root);
    let (disks, others): (Vec<_>, Vec<_>) = functions.partition(Function::is_mass_storage);
    let mut without_room = Vec::new();
    for (functions, low) in [(&others, 0), (&disks, LOW_MAX)] {
        for function in functions {
            match function.place(header::BAR0, 1, low, &mut free) {
                Err(NoRoom) => without_room.push(function.rid),
                Ok(()) if low != 0 && function.is_virtio() => function.enable(),
                Ok(()) => {}
            }
        }
    }
    if let Some(first) = without_room.first() {
        log::warn!(
            "{} PCI functions of segment 0, the first at {first}, have BARs without an address, which firmware has to \
             place: the MMIO addresses do not suffice; move devices to another segment, or give this one more weight",
            without_room.len()
        );
    }
}

/// The own functions of the devices on a root bus.
fn on_root<D>(topology: &Topology<D>, root: u8) -> impl Iterator<Item = Function<'_, D>> {
    let rids = topology.iter().map(|(placement, _)| placement.rid).filter(move |rid| rid.bus() == root);
    rids.map(move |rid| Function { topology, rid })
}

/// Gives each BAR and VF BAR of the devices on a root bus an address of its own.
///
/// # Errors
///
/// Fails if there are not enough.
pub(crate) fn place_bars<D: ConfigTarget>(topology: &Topology<D>, root: u8, mut free: Apertures) -> Result<(), NoRoom> {
    for function in on_root(topology, root) {
        function.place(header::BAR0, 1, 0, &mut free)?;
        if let Some(capability) = function.sriov() {
            let total_vfs = function.read(capability + sriov::INITIAL_TOTAL_VFS) >> 16;
            function.place(capability + sriov::VF_BAR0, u64::from(total_vfs), 0, &mut free)?;
        }
    }
    Ok(())
}

struct Function<'a, D> {
    topology: &'a Topology<D>,
    rid: Rid,
}

impl<D: ConfigTarget> Function<'_, D> {
    fn ecam(&self, offset: u16) -> u64 {
        u64::from(self.rid.to_bits()) << 12 | u64::from(offset)
    }

    fn read(&self, offset: u16) -> u32 {
        let mut data = [0; 4];
        ecam_read(self.topology, self.ecam(offset), &mut data);
        u32::from_le_bytes(data)
    }

    fn write(&self, offset: u16, value: u32) {
        ecam_write(self.topology, self.ecam(offset), &value.to_le_bytes());
    }

    /// True if the function's base class is mass storage.
    fn is_mass_storage(&self) -> bool {
        self.read(header::CLASS_REVISION) >> 24 == MASS_STORAGE
    }

    /// True if the function's vendor is that of virtio devices.
    fn is_virtio(&self) -> bool {
        self.read(header::ID) & 0xffff == VIRTIO_VENDOR
    }

    /// Sets Memory Space and Bus Master.
    fn enable(&self) {
        // Status, in the upper half, is cleared by ones (`PCIe 6.2 §7.5.1.1.4`).
        let old = self.read(header::COMMAND_STATUS) & 0xffff;
        self.write(header::COMMAND_STATUS, old | u32::from(command::MEMORY_SPACE | command::BUS_MASTER));
    }

    /// The offset of the SR-IOV capability.
    fn sriov(&self) -> Option<u16> {
        let mut offset = header::FIRST_EXTENDED_CAPABILITY;
        // Each capability has at least 4 bytes, which bounds their number.
        for _ in 0..(0x1000 - header::FIRST_EXTENDED_CAPABILITY) / 4 {
            let [id_low, id_high, next_low, next_high] = self.read(offset).to_le_bytes();
            if u16::from_le_bytes([id_low, id_high]) == extended_capability_id::SRIOV {
                return Some(offset);
            }
            offset = u16::from_le_bytes([next_low, next_high]) >> 4 & !0b11;
            if offset < header::FIRST_EXTENDED_CAPABILITY {
                break;
            }
        }
        None
    }

    /// Places the six BARs from `first` on, `count` slices each. 64-bit BARs of up to `low` bytes go below 4 GiB while
    /// there is room. A BAR without room becomes 0; the error is returned after all others are placed.
    fn place(&self, first: u16, count: u64, low: u64, free: &mut Apertures) -> Result<(), NoRoom> {
        let (mut offset, mut result) = (first, Ok(()));
        while offset < first + 6 * 4 {
            let is_64 = self.read(offset) & bar::MEMORY64 != 0;
            let registers = if is_64 { 2 } else { 1 };
            // A 64-bit BAR cannot begin in the last register.
            if offset + registers * 4 > first + 6 * 4 {
                break;
            }
            let slice = self.size(offset, is_64);
            if slice != 0 {
                let base = slice.checked_mul(count).ok_or(NoRoom).and_then(|len| {
                    let below = if is_64 && len > low { Err(NoRoom) } else { take(&mut free.mem32, slice, len) };
                    if is_64 { below.or_else(|NoRoom| take(&mut free.mem64, slice, len)) } else { below }
                });
                result = result.and(base.map(drop));
                let base = base.unwrap_or(0);
                self.write(offset, u32::try_from(base & 0xffff_ffff).unwrap_or(0));
                if is_64 {
                    self.write(offset + 4, u32::try_from(base >> 32).unwrap_or(0));
                }
            }
            offset += registers * 4;
        }
        result
    }

    /// The bytes of one slice: the lowest address bit that can be set (`PCIe 6.2 §7.5.1.2.1`). 0 if there is no BAR.
    fn size(&self, offset: u16, is_64: bool) -> u64 {
        let mut mask = 0;
        for (n, offset) in (offset..).step_by(4).take(if is_64 { 2 } else { 1 }).enumerate() {
            self.write(offset, u32::MAX);
            mask |= u64::from(self.read(offset)) << (32 * n);
        }
        let mask = mask & !0xf;
        mask & mask.wrapping_neg()
    }
}

/// Takes `len` bytes, aligned to `align`, from the start of `free`.
fn take(free: &mut Range<u64>, align: u64, len: u64) -> Result<u64, NoRoom> {
    let base = free.start.checked_next_multiple_of(align).ok_or(NoRoom)?;
    let end = base.checked_add(len).filter(|end| *end <= free.end).ok_or(NoRoom)?;
    free.start = end;
    Ok(base)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;
    use pci::{
        BarIndex, BarKind, ConfigShape, ConfigSpace, Dword, DwordWrite, Identity, Placement, Role, SriovShape, Window,
    };

    use super::*;

    struct Space(Mutex<ConfigSpace>);

    impl ConfigTarget for Space {
        fn config_read(&self, _rid: Rid, reg: Dword) -> u32 {
            self.0.lock().read(reg)
        }

        fn config_write(&self, _rid: Rid, reg: Dword, write: DwordWrite) {
            let _ = self.0.lock().write(reg, write);
        }
    }

    fn bar(n: u8) -> BarIndex {
        BarIndex::new(n).unwrap()
    }

    fn pf(topology: &mut Topology<Arc<Space>>, total_vfs: u16) -> Arc<Space> {
        let bars = vec![
            (bar(0), BarKind::Memory32 { size: 0x1000 }),
            (bar(2), BarKind::Memory64 { size: 0x2000, prefetchable: true }),
        ];
        let placement = topology.place(None, total_vfs).unwrap();
        let vfs = placement.vfs.unwrap();
        let role = Role::Pf(SriovShape {
            total_vfs,
            first_vf_offset: vfs.first_vf_offset,
            vf_stride: vfs.vf_stride,
            vf_device_id: 0x1041,
            bars: vec![(bar(4), BarKind::Memory64 { size: 0x4000, prefetchable: true })],
            function_dependency_link: 0,
        });
        plug(topology, placement, (VIRTIO_VENDOR as u16, 2), role, bars)
    }

    /// A plain function of this vendor and base class, with 64-bit BARs of these sizes.
    fn plain(topology: &mut Topology<Arc<Space>>, vendor: u16, class: u8, sizes: &[u64]) -> Arc<Space> {
        let bars = [0, 2, 4].into_iter().zip(sizes);
        let bars = bars.map(|(n, size)| (bar(n), BarKind::Memory64 { size: *size, prefetchable: true })).collect();
        let placement = topology.place(None, 0).unwrap();
        plug(topology, placement, (vendor, class), Role::Plain, bars)
    }

    fn plug(
        topology: &mut Topology<Arc<Space>>,
        placement: Placement,
        (vendor, class): (u16, u8),
        role: Role,
        bars: Vec<(BarIndex, BarKind)>,
    ) -> Arc<Space> {
        let identity =
            Identity { vendor, device: 2, revision: 1, class: [class, 0, 0], subsystem_vendor: 1, subsystem: 2 };
        let space = ConfigSpace::new(ConfigShape { bars, ..ConfigShape::new(identity, role) }).unwrap();
        let space = Arc::new(Space(Mutex::new(space)));
        topology.plug(placement, space.clone()).unwrap();
        space
    }

    fn register(space: &Space, offset: u16) -> u32 {
        space.0.lock().read(Dword::containing(offset))
    }

    /// The addresses in the three 64-bit BARs.
    fn bases(space: &Space) -> [u64; 3] {
        [0x10, 0x18, 0x20].map(|at| u64::from(register(space, at + 4)) << 32 | u64::from(register(space, at) & !0xf))
    }

    fn windows(space: &Space, num_vfs: u16) -> Vec<Window> {
        let mut space = space.0.lock();
        for (offset, value) in [(4, 2), (0x110, u32::from(num_vfs)), (0x108, 9)] {
            let _ = space.write(Dword::containing(offset), DwordWrite::full(value));
        }
        let mut windows = Vec::new();
        space.windows(&mut windows);
        windows
    }

    const APERTURES: Apertures = Apertures { mem32: 0xc000_0000..0xe800_0000, mem64: 0x1_4000_1000..0xff_0000_0000 };

    #[test]
    fn bars_do_not_overlap_and_vf_bars_have_room_for_all_vfs() {
        let mut topology = Topology::new(127);
        let functions = [pf(&mut topology, 300), pf(&mut topology, 8)];
        place_bars(&topology, 0, APERTURES).unwrap();
        let mut all: Vec<_> = functions.iter().zip([300, 8]).flat_map(|(space, n)| windows(space, n)).collect();
        assert_eq!(all.len(), 6);
        all.sort_by_key(|window| window.base);
        assert!(all.is_sorted_by(|a, b| a.base + a.len <= b.base), "{all:x?}");
        for window in &all {
            let end = window.base + window.len;
            let inside = |range: &Range<u64>| range.contains(&window.base) && end <= range.end;
            assert!(inside(&APERTURES.mem32) || inside(&APERTURES.mem64), "{window:x?}");
        }
        assert_eq!(all.iter().map(|window| window.len).max(), Some(300 * 0x4000));
    }

    #[test]
    fn too_little_room_is_an_error() {
        let mut topology = Topology::new(127);
        pf(&mut topology, 8);
        let mem64 = 0x1_0000_0000..0x1_0000_8000;
        assert_eq!(place_bars(&topology, 0, Apertures { mem64, ..APERTURES }), Err(NoRoom));
    }

    #[test]
    fn firmware_finds_its_disks_enabled_and_below_4_gib() {
        let mut topology = Topology::new(127);
        let disks = [0, 1].map(|_| plain(&mut topology, 0x1af4, 0x01, &[0x2000, 0x1000]));
        let of_the_host = plain(&mut topology, 0x144d, 0x01, &[0x4000]);
        let console = plain(&mut topology, 0x1af4, 0x07, &[0x2000, 0x1000]);
        let nic = pf(&mut topology, 8);
        hand_over(&topology, 0, APERTURES);
        let low = APERTURES.mem32.start;
        // The NIC's 32-bit BAR is placed before all disks.
        assert_eq!(u64::from(register(&nic, 0x10)), low);
        assert_eq!(bases(&disks[0]), [low + 0x2000, low + 0x4000, 0]);
        assert_eq!(bases(&disks[1]), [low + 0x6000, low + 0x8000, 0]);
        assert_eq!(bases(&of_the_host), [low + 0xc000, 0, 0]);
        let high = APERTURES.mem64.start.next_multiple_of(0x2000);
        assert_eq!((bases(&console), bases(&nic)[1]), ([high, high + 0x2000, 0], high + 0x4000));
        let commands = [&disks[0], &disks[1], &of_the_host, &console, &nic].map(|space| register(space, 4) & 0xffff);
        assert_eq!(commands, [6, 6, 0, 0, 0]);
        // VF BAR 4 of the capability at 0x100.
        assert_eq!([0x134, 0x138].map(|at| register(&nic, at) & !0xf), [0, 0]);
    }

    #[test]
    fn a_kernel_finds_no_device_enabled() {
        let mut topology = Topology::new(127);
        let disk = plain(&mut topology, 0x1af4, 0x01, &[0x2000]);
        place_bars(&topology, 0, APERTURES).unwrap();
        assert_eq!((bases(&disk)[0], register(&disk, 4) & 0xffff), (APERTURES.mem64.start.next_multiple_of(0x2000), 0));
    }

    #[test]
    fn a_disks_bar_without_room_below_4_gib_lies_above() {
        let mut topology = Topology::new(127);
        let disk = plain(&mut topology, 0x1af4, 0x01, &[2 * LOW_MAX, LOW_MAX, 0x1000]);
        let mem32 = 0xc000_0000..0xc010_0000;
        hand_over(&topology, 0, Apertures { mem32, ..APERTURES });
        let high = APERTURES.mem64.start.next_multiple_of(2 * LOW_MAX);
        assert_eq!(bases(&disk), [high, 0xc000_0000, high + 2 * LOW_MAX]);
        assert_eq!(register(&disk, 4) & 0xffff, 6);
    }

    #[test]
    fn a_bar_without_room_under_firmware_stays_0_and_disabled() {
        let mut topology = Topology::new(127);
        let without_room = plain(&mut topology, 0x1af4, 0x01, &[LOW_MAX, 0x1000]);
        let disk = plain(&mut topology, 0x1af4, 0x01, &[0x2000]);
        let nic = pf(&mut topology, 8);
        let (mem32, mem64) = (0xc000_0000..0xc000_2000, 0x1_0000_0000..0x1_0000_8000);
        hand_over(&topology, 0, Apertures { mem32, mem64 });
        assert_eq!((register(&nic, 0x10), bases(&nic)[1]), (0xc000_0000, 0x1_0000_0000));
        assert_eq!((bases(&without_room), register(&without_room, 4) & 0xffff), ([0, 0xc000_1000, 0], 0));
        // No low address is left.
        assert_eq!((bases(&disk)[0], register(&disk, 4) & 0xffff), (0x1_0000_2000, 6));
    }

    #[test]
    fn a_disk_takes_no_low_address_that_another_bar_needs() {
        let mut topology = Topology::new(127);
        let disk = plain(&mut topology, 0x1af4, 0x01, &[0x1000]);
        let nic = pf(&mut topology, 8);
        hand_over(&topology, 0, Apertures { mem32: 0xc000_0000..0xc000_1000, ..APERTURES });
        assert_eq!(register(&nic, 0x10), 0xc000_0000);
        assert!(bases(&disk)[0] >= APERTURES.mem64.start);
    }
}
