//! Routing IDs of a segment, and the device that reserves each.
//!
//! A device sits in a slot of a root bus, as a single function. Bus 0 is one; a segment may have others, each with the
//! buses up to the next one. The VFs of a PF have their own buses: the lowest consecutive buses behind the PF's root
//! bus that are free when the PF is plugged. VF i is function `i % 256` of the `i / 256`-th of them. All of this is
//! fixed at plug time, so no routing ID changes its device while a guest runs.

use std::ops::RangeInclusive;

use crate::{Bdf, Rid, VfIndex, VfRouting};

/// Slots on a root bus.
const SLOTS: u8 = 32;

/// Numbers of devices and VFs that a segment has room for.
///
/// ```
/// use pci_sriov::Capacity;
///
/// let capacity = Capacity::new(127);
/// assert_eq!((capacity.vf_buses(), capacity.vfs()), (127, 32_512));
/// assert_eq!(Capacity::buses_for(300), 2);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    last_bus: u8,
}

impl Capacity {
    /// Slots of bus 0 that [`Topology::place`] chooses from. Slot 0 must be requested; it is usually the host bridge's.
    pub const SLOTS: RangeInclusive<u8> = 1..=SLOTS - 1;
    /// VFs on one bus: every function of it.
    pub const VFS_PER_BUS: u16 = 256;

    /// The capacity of a segment with buses 0 to `last_bus`.
    pub const fn new(last_bus: u8) -> Self {
        Self { last_bus }
    }

    /// Buses that can carry VFs: all except bus 0.
    pub const fn vf_buses(self) -> u8 {
        self.last_bus
    }

    /// VFs that the segment has routing IDs for, 0 to 65,280.
    pub const fn vfs(self) -> u16 {
        self.last_bus as u16 * Self::VFS_PER_BUS
    }

    /// Buses that the VFs of a PF with `total_vfs` VFs take, 0 to 256. VFs of two PFs never share a bus.
    pub const fn buses_for(total_vfs: u16) -> u16 {
        total_vfs.div_ceil(Self::VFS_PER_BUS)
    }
}

/// Reason why a device cannot be placed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TopologyError {
    /// The slot number is above 31.
    #[error("there is no slot {0}; slots are 0 to 31")]
    NoSuchSlot(u8),
    /// Another device has this slot.
    #[error("slot {0} is taken")]
    SlotTaken(u8),
    /// All slots are taken. Slot 0 is only used on request.
    #[error("all slots of bus 0 are taken")]
    NoSlot,
    /// All slots of a root bus other than 0 are taken.
    #[error("all slots of root bus {0} are taken")]
    NoSlotOnRoot(u8),
    /// The bus is not a root bus.
    #[error("the segment has no root bus {0}")]
    NoSuchRoot(u8),
    /// The VFs need more consecutive buses than are free.
    #[error("{total_vfs} VFs need {needed} consecutive buses; {free} are free")]
    NoBuses {
        /// Number of VFs.
        total_vfs: u16,
        /// Number of buses needed.
        needed: u16,
        /// The largest number of consecutive free buses.
        free: u16,
    },
}

/// The location of a device: its segment, and its routing IDs there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    /// Number of the segment.
    pub segment: u16,
    /// Routing ID of the device's own function.
    pub rid: Rid,
    /// Routing IDs of its VFs, if it has any.
    pub vfs: Option<VfPlacement>,
}

/// The routing IDs of a PF's VFs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VfPlacement {
    /// Number of reserved VFs, at least 1.
    pub total_vfs: u16,
    /// First VF Offset: from the PF's routing ID to that of VF 0.
    pub first_vf_offset: u16,
    /// VF Stride.
    pub vf_stride: u16,
}

impl VfPlacement {
    /// The routing ID of VF `index`, which is below [`Self::total_vfs`], of the PF `pf` (`PCIe 6.2 §9.3.3.9,
    /// §9.3.3.10`).
    #[must_use]
    pub const fn vf_rid(self, pf: Rid, index: VfIndex) -> Rid {
        let Self { first_vf_offset, vf_stride, .. } = self;
        VfRouting { first_vf_offset, vf_stride }.vf_rid(pf, index)
    }
}

impl Placement {
    /// The address of the function at `rid`, one of the device's.
    #[must_use]
    pub const fn bdf(self, rid: Rid) -> Bdf {
        Bdf { segment: self.segment, rid }
    }

    /// The first bus of its VFs, if it has any.
    #[must_use]
    pub fn first_vf_bus(&self) -> Option<u8> {
        self.vfs.map(|vfs| vfs.vf_rid(self.rid, VfIndex(0)).bus())
    }

    fn vf_buses(&self) -> RangeInclusive<u8> {
        match self.vfs {
            Some(vfs) => {
                let last = VfIndex(vfs.total_vfs.saturating_sub(1));
                vfs.vf_rid(self.rid, VfIndex(0)).bus()..=vfs.vf_rid(self.rid, last).bus()
            }
            #[expect(clippy::reversed_empty_ranges, reason = "no bus")]
            None => 1..=0,
        }
    }
}

#[derive(Debug, Clone)]
struct Plugged<D> {
    placement: Placement,
    device: D,
}

/// A bus, and the devices on it.
#[derive(Debug, Clone)]
enum Bus {
    /// A root bus: the device in each slot.
    Root(Box<[Option<u16>; SLOTS as usize]>),
    /// A bus for VFs: the device whose VFs are on it.
    Vfs(Option<u16>),
}

impl Bus {
    fn root() -> Self {
        Self::Root(Box::new([None; SLOTS as usize]))
    }
}

/// The devices of one segment.
///
/// Meant as an immutable snapshot that accesses share, and that plugging replaces by a changed copy.
#[derive(Debug, Clone)]
pub struct Topology<D> {
    segment: u16,
    last_bus: u8,
    devices: Vec<Plugged<D>>,
    /// By number.
    buses: Box<[Bus]>,
}

impl<D> Topology<D> {
    /// Creates segment 0 with buses 0 to `last_bus`, without devices.
    pub fn new(last_bus: u8) -> Self {
        Self::of_segment(0, last_bus)
    }

    /// Creates the segment with this number and with buses 0 to `last_bus`, without devices.
    pub fn of_segment(segment: u16, last_bus: u8) -> Self {
        let bus = |bus| if bus == 0 { Bus::root() } else { Bus::Vfs(None) };
        Self { segment, last_bus, devices: Vec::new(), buses: (0..=last_bus).map(bus).collect() }
    }

    /// Makes further buses of an empty segment root buses. Each has the buses up to the next one. Numbers of buses that
    /// the segment does not have are ignored.
    #[must_use]
    pub fn with_root_buses(mut self, roots: impl IntoIterator<Item = u8>) -> Self {
        for root in roots {
            if let Some(bus) = self.buses.get_mut(usize::from(root)) {
                *bus = Bus::root();
            }
        }
        self
    }

    /// Numbers of devices and VFs that fit the empty segment, if bus 0 is its only root bus.
    pub const fn capacity(&self) -> Capacity {
        Capacity::new(self.last_bus)
    }

    /// Finds a placement on bus 0 for a device with `total_vfs` VFs: in `slot`, or in the lowest free one from 1.
    ///
    /// # Errors
    ///
    /// Fails if there is none.
    pub fn place(&self, slot: Option<u8>, total_vfs: u16) -> Result<Placement, TopologyError> {
        self.place_on(0, slot, total_vfs)
    }

    /// As [`Self::place`], on the root bus `root`.
    ///
    /// # Errors
    ///
    /// Fails if there is no placement, or no such root bus.
    pub fn place_on(&self, root: u8, slot: Option<u8>, total_vfs: u16) -> Result<Placement, TopologyError> {
        let none = if root == 0 { TopologyError::NoSlot } else { TopologyError::NoSlotOnRoot(root) };
        self.slots(root)?;
        let slot = match slot {
            Some(slot) => self.check_slot(root, slot)?,
            None => Capacity::SLOTS.into_iter().find(|slot| self.check_slot(root, *slot).is_ok()).ok_or(none)?,
        };
        let rid = Rid::from_bus_devfn(root, slot << 3);
        if total_vfs == 0 {
            return Ok(Placement { segment: self.segment, rid, vfs: None });
        }
        let first = Rid::from_bus_devfn(self.free_buses(root, total_vfs)?, 0);
        let first_vf_offset = first.to_bits() - rid.to_bits();
        let vfs = Some(VfPlacement { total_vfs, first_vf_offset, vf_stride: 1 });
        Ok(Placement { segment: self.segment, rid, vfs })
    }

    /// The former placement of a device with `total_vfs` VFs: in `slot` of the root bus `root`, with VFs on `first_bus`
    /// and the following buses.
    ///
    /// # Errors
    ///
    /// Fails if it is taken, or does not exist.
    pub fn place_at(
        &self,
        root: u8,
        slot: u8,
        first_bus: Option<u8>,
        total_vfs: u16,
    ) -> Result<Placement, TopologyError> {
        let slot = self.check_slot(root, slot)?;
        let rid = Rid::from_bus_devfn(root, slot << 3);
        let (first, needed) = match (first_bus, total_vfs) {
            (None, 0) => return Ok(Placement { segment: self.segment, rid, vfs: None }),
            (Some(first), 1..) if first > root => (first, Capacity::buses_for(total_vfs)),
            _ => return Err(TopologyError::NoBuses { total_vfs, needed: Capacity::buses_for(total_vfs), free: 0 }),
        };
        let behind = self.buses_behind(root);
        let is_free = |bus: u16| {
            let bus = u8::try_from(bus).ok().filter(|bus| behind.contains(bus));
            bus.is_some_and(|bus| self.is_free(bus))
        };
        let buses = u16::from(first)..u16::from(first).saturating_add(needed);
        let free = u16::try_from(buses.clone().take_while(|bus| is_free(*bus)).count()).unwrap_or(u16::MAX);
        if free < needed {
            return Err(TopologyError::NoBuses { total_vfs, needed, free });
        }
        let first_vf_offset = Rid::from_bus_devfn(first, 0).to_bits() - rid.to_bits();
        Ok(Placement {
            segment: self.segment,
            rid,
            vfs: Some(VfPlacement { total_vfs, first_vf_offset, vf_stride: 1 }),
        })
    }

    /// The slots of a root bus.
    fn slots(&self, root: u8) -> Result<&[Option<u16>; SLOTS as usize], TopologyError> {
        match self.buses.get(usize::from(root)) {
            Some(Bus::Root(slots)) => Ok(slots),
            _ => Err(TopologyError::NoSuchRoot(root)),
        }
    }

    fn check_slot(&self, root: u8, slot: u8) -> Result<u8, TopologyError> {
        match self.slots(root)?.get(usize::from(slot)) {
            None => Err(TopologyError::NoSuchSlot(slot)),
            Some(Some(_)) => Err(TopologyError::SlotTaken(slot)),
            Some(None) => Ok(slot),
        }
    }

    /// The buses for VFs behind a root bus: all up to the next root bus.
    fn buses_behind(&self, root: u8) -> RangeInclusive<u8> {
        let is_vfs = |bus: &u8| matches!(self.buses.get(usize::from(*bus)), Some(Bus::Vfs(_)));
        let last = (root..self.last_bus).map(|before| before + 1).take_while(is_vfs).last();
        match (root.checked_add(1), last) {
            (Some(first), Some(last)) => first..=last,
            #[expect(clippy::reversed_empty_ranges, reason = "no bus")]
            _ => 1..=0,
        }
    }

    fn is_free(&self, bus: u8) -> bool {
        matches!(self.buses.get(usize::from(bus)), Some(Bus::Vfs(None)))
    }

    /// The first of the lowest consecutive free buses behind `root` that hold `total_vfs` VFs.
    fn free_buses(&self, root: u8, total_vfs: u16) -> Result<u8, TopologyError> {
        let needed = Capacity::buses_for(total_vfs);
        let (mut run, mut longest) = (0u16, 0);
        for bus in self.buses_behind(root) {
            run = if self.is_free(bus) { run + 1 } else { 0 };
            longest = longest.max(run);
            if run == needed {
                // The run ends at `bus`, so it fits a byte.
                return Ok(u8::try_from(run - 1).map_or(bus, |before| bus - before));
            }
        }
        Err(TopologyError::NoBuses { total_vfs, needed, free: longest })
    }

    /// Plugs `device` at a placement from [`Self::place`] or [`Self::place_at`].
    ///
    /// # Errors
    ///
    /// Fails if it was taken in between; nothing is changed then.
    pub fn plug(&mut self, placement: Placement, device: D) -> Result<(), TopologyError> {
        let slot = placement.rid.device();
        let total_vfs = placement.vfs.map_or(0, |vfs| vfs.total_vfs);
        if self.place_at(placement.rid.bus(), slot, placement.first_vf_bus(), total_vfs)? != placement {
            return Err(TopologyError::SlotTaken(slot));
        }
        // Each device has a slot, so there are at most 32 on each bus.
        let n = u16::try_from(self.devices.len()).map_err(|_| TopologyError::NoSlot)?;
        self.devices.push(Plugged { placement, device });
        self.own(placement, Some(n));
        Ok(())
    }

    /// Removes the device whose own function is `rid` and returns it; its routing IDs are free from now on.
    pub fn unplug(&mut self, rid: Rid) -> Option<D> {
        let n = self.devices.iter().position(|plugged| plugged.placement.rid == rid)?;
        let Plugged { placement, device } = self.devices.swap_remove(n);
        self.own(placement, None);
        if let (Some(moved), Ok(n)) = (self.devices.get(n), u16::try_from(n)) {
            self.own(moved.placement, Some(n));
        }
        Some(device)
    }

    fn own(&mut self, placement: Placement, owner: Option<u16>) {
        if let Some(Bus::Root(slots)) = self.buses.get_mut(usize::from(placement.rid.bus()))
            && let Some(slot) = slots.get_mut(usize::from(placement.rid.device()))
        {
            *slot = owner;
        }
        for bus in placement.vf_buses() {
            if let Some(Bus::Vfs(bus)) = self.buses.get_mut(usize::from(bus)) {
                *bus = owner;
            }
        }
    }

    /// The device that reserves `rid`, whether a function exists there or not.
    pub fn lookup(&self, rid: Rid) -> Option<&D> {
        let owner = match self.buses.get(usize::from(rid.bus()))? {
            Bus::Root(slots) if rid.function() == 0 => *slots.get(usize::from(rid.device()))?,
            Bus::Root(_) => None,
            Bus::Vfs(owner) => *owner,
        };
        self.devices.get(usize::from(owner?)).map(|plugged| &plugged.device)
    }

    /// All devices with their places.
    pub fn iter(&self) -> impl Iterator<Item = (Placement, &D)> {
        self.devices.iter().map(|plugged| (plugged.placement, &plugged.device))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn plug(topology: &mut Topology<u32>, slot: Option<u8>, total_vfs: u16, device: u32) -> Placement {
        let placement = topology.place(slot, total_vfs).unwrap();
        topology.plug(placement, device).unwrap();
        placement
    }

    fn owned(topology: &Topology<u32>, device: u32) -> usize {
        (0..=u16::MAX).filter(|&rid| topology.lookup(Rid::from_bits(rid)) == Some(&device)).count()
    }

    #[test]
    fn vfs_have_predictable_addresses_on_buses_of_their_own() {
        let mut topology = Topology::new(127);
        let first = plug(&mut topology, None, 8, 1);
        let second = plug(&mut topology, Some(9), 300, 2);
        let third = plug(&mut topology, None, 1, 3);
        let vf = |placement: Placement, index| placement.vfs.unwrap().vf_rid(placement.rid, VfIndex(index)).to_string();
        assert_eq!(
            (first.rid.to_string(), vf(first, 0), vf(first, 7)),
            ("00:01.0".into(), "01:00.0".into(), "01:00.7".into())
        );
        assert_eq!(
            (second.rid.to_string(), vf(second, 0), vf(second, 299)),
            ("00:09.0".into(), "02:00.0".into(), "03:05.3".into())
        );
        assert_eq!((third.rid.to_string(), vf(third, 0)), ("00:02.0".into(), "04:00.0".into()));
    }

    #[test]
    fn a_place_has_the_segments_number() {
        let mut topology = Topology::of_segment(1, 0);
        let placement = plug(&mut topology, Some(3), 0, 1);
        assert_eq!(placement.bdf(placement.rid).to_string(), "0001:00:03.0");
        assert!(matches!(topology.place(None, 1), Err(TopologyError::NoBuses { free: 0, .. })));
        assert_eq!(topology.unplug(placement.rid), Some(1));
    }

    #[test]
    fn capacity_is_what_can_be_placed() {
        for last_bus in [0, 1, 127, 255] {
            let mut topology = Topology::new(last_bus);
            let capacity = topology.capacity();
            assert_eq!(u16::from(capacity.vf_buses()), Capacity::buses_for(capacity.vfs()));
            assert!(topology.place(None, capacity.vfs() + 1).is_err(), "{last_bus}");
            let placement = plug(&mut topology, None, capacity.vfs(), 0);
            assert_eq!(owned(&topology, 0), usize::from(capacity.vfs()) + 1);
            assert_eq!((placement.rid.device(), topology.place(None, 1).is_err()), (*Capacity::SLOTS.start(), true));
            for device in 1..Capacity::SLOTS.count() {
                plug(&mut topology, None, 0, u32::try_from(device).unwrap());
            }
            assert_eq!(topology.place(None, 0), Err(TopologyError::NoSlot));
        }
        assert_eq!(Capacity::new(255).vfs(), 65_280);
        assert_eq!([0, 1, 256, 257, u16::MAX].map(Capacity::buses_for), [0, 1, 1, 2, 256]);
    }

    #[test]
    fn only_function_0_of_a_slot_is_reserved() {
        let mut topology = Topology::new(127);
        plug(&mut topology, Some(3), 0, 1);
        assert_eq!(owned(&topology, 1), 1);
        assert_eq!(topology.lookup(Rid::new(0, 3, 1).unwrap()), None);
        assert_eq!(topology.lookup(Rid::new(1, 3, 0).unwrap()), None);
    }

    /// G22, B20: more VFs than the segment has buses for.
    #[test]
    fn a_device_without_a_place_is_refused_with_the_reason() {
        let mut topology = Topology::new(3);
        plug(&mut topology, Some(1), 257, 1);
        assert_eq!(topology.place(Some(1), 0), Err(TopologyError::SlotTaken(1)));
        assert_eq!(topology.place(Some(32), 0), Err(TopologyError::NoSuchSlot(32)));
        let no_buses = TopologyError::NoBuses { total_vfs: 512, needed: 2, free: 1 };
        assert_eq!(topology.place(None, 512), Err(no_buses));
        assert!(matches!(topology.place(None, u16::MAX), Err(TopologyError::NoBuses { .. })));
        for device in 2..32 {
            plug(&mut topology, None, 0, device);
        }
        assert_eq!(topology.place(None, 0), Err(TopologyError::NoSlot));
        assert_eq!(topology.place(Some(0), 0).map(|placement| placement.rid), Ok(Rid::from_bits(0)));
    }

    #[test]
    fn a_place_that_was_taken_in_between_changes_nothing() {
        let mut topology = Topology::new(127);
        let placement = topology.place(Some(4), 8).unwrap();
        plug(&mut topology, Some(5), 8, 1);
        assert!(topology.plug(placement, 2).is_err());
        assert_eq!((owned(&topology, 1), owned(&topology, 2)), (257, 0));
    }

    /// B19: a device without SR-IOV is removed, among PFs.
    #[test]
    fn a_plain_device_is_unplugged_and_the_others_stay() {
        let mut topology = Topology::new(127);
        let pf = plug(&mut topology, None, 8, 1);
        let plain = plug(&mut topology, None, 0, 2);
        let last = plug(&mut topology, None, 300, 3);
        assert_eq!(topology.unplug(plain.rid), Some(2));
        assert_eq!([1, 2, 3].map(|device| owned(&topology, device)), [257, 0, 513]);
        assert_eq!((topology.lookup(pf.rid), topology.lookup(last.rid)), (Some(&1), Some(&3)));
        let mut left: Vec<_> = topology.iter().map(|(placement, device)| (placement.rid, *device)).collect();
        left.sort_unstable();
        assert_eq!(left, [(pf.rid, 1), (last.rid, 3)]);
    }

    #[test]
    fn a_device_goes_back_to_where_it_was() {
        let mut topology = Topology::new(127);
        let first = plug(&mut topology, None, 8, 1);
        let second = plug(&mut topology, None, 300, 2);
        let plain = plug(&mut topology, None, 0, 3);
        assert_eq!(topology.unplug(first.rid), Some(1));
        let mut again = Topology::new(127);
        for (placement, device) in [(plain, 3), (second, 2)] {
            let (slot, vfs) = (placement.rid.device(), placement.vfs.map_or(0, |vfs| vfs.total_vfs));
            let found = again.place_at(0, slot, placement.first_vf_bus(), vfs).unwrap();
            assert_eq!(found, placement);
            again.plug(found, device).unwrap();
        }
        assert_eq!((owned(&again, 2), again.lookup(Rid::new(2, 0, 0).unwrap())), (513, Some(&2)));
        for (slot, bus, vfs) in [
            (1, Some(1), 257), // The second of two buses is taken.
            (1, Some(3), 1),
            (1, Some(0), 1),
            (1, Some(128), 1),
            (1, Some(127), 257),
            (1, Some(255), u16::MAX),
            (1, None, 1),
            (1, Some(1), 0),
            (2, Some(1), 1),
            (32, None, 0),
        ] {
            assert!(again.place_at(0, slot, bus, vfs).is_err(), "{slot} {bus:?} {vfs}");
        }
        assert_eq!(again.place_at(0, 1, Some(1), 8), Ok(first));
    }

    #[test]
    fn each_root_bus_has_slots_and_vf_buses_of_its_own() {
        let mut topology = Topology::new(127).with_root_buses([64, 126, 127, 200]);
        let place = |topology: &mut Topology<u32>, root, total_vfs, device| {
            let placement = topology.place_on(root, Some(3), total_vfs).unwrap();
            topology.plug(placement, device).unwrap();
            (placement.rid.to_string(), placement.first_vf_bus())
        };
        assert_eq!(place(&mut topology, 0, 300, 1), ("00:03.0".to_string(), Some(1)));
        assert_eq!(place(&mut topology, 64, 300, 2), ("40:03.0".to_string(), Some(65)));
        assert_eq!(place(&mut topology, 126, 0, 3), ("7e:03.0".to_string(), None));
        assert_eq!(place(&mut topology, 127, 0, 4), ("7f:03.0".to_string(), None));
        assert_eq!([1, 2, 3, 4].map(|device| owned(&topology, device)), [513, 513, 1, 1]);
        for (root, free) in [(0, 61), (64, 59), (126, 0), (127, 0)] {
            let no_buses = TopologyError::NoBuses { total_vfs: u16::MAX, needed: 256, free };
            assert_eq!(topology.place_on(root, None, u16::MAX), Err(no_buses));
        }
        for root in [1, 65, 200] {
            assert_eq!(topology.place_on(root, None, 0), Err(TopologyError::NoSuchRoot(root)));
            assert_eq!(topology.place_at(root, 1, None, 0), Err(TopologyError::NoSuchRoot(root)));
        }
        // VFs are behind the PF's own root bus.
        for (root, first, vfs) in [(0, 63, 257), (0, 64, 1), (0, 67, 1), (64, 3, 1), (64, 126, 1), (127, 128, 1)] {
            assert!(topology.place_at(root, 9, Some(first), vfs).is_err(), "{root} {first}");
        }
        let again = topology.place_at(64, 9, Some(67), 8).unwrap();
        assert_eq!((again.rid.to_string(), again.first_vf_bus()), ("40:09.0".to_string(), Some(67)));
        assert_eq!(topology.unplug(Rid::new(64, 3, 0).unwrap()), Some(2));
        assert_eq!([1, 2, 3, 4].map(|device| owned(&topology, device)), [513, 0, 1, 1]);
    }

    /// B11: removing a PF frees all of its routing IDs.
    #[test]
    fn buses_are_free_again_after_an_unplug() {
        let mut topology = Topology::new(2);
        let first = plug(&mut topology, None, 256, 1);
        let second = plug(&mut topology, None, 256, 2);
        assert_eq!(topology.unplug(first.rid), Some(1));
        assert_eq!(topology.unplug(first.rid), None);
        assert_eq!((owned(&topology, 1), owned(&topology, 2)), (0, 257));
        assert_eq!(plug(&mut topology, None, 256, 3), first);
        assert_eq!(topology.lookup(second.rid), Some(&2));
    }

    proptest! {
        /// G21: routing IDs of any devices in any slots.
        #[test]
        fn no_two_functions_share_a_routing_id(
            plugs in prop::collection::vec((prop::option::of(0u8..34), 0u16..1500), 0..12),
        ) {
            let mut topology = Topology::new(127);
            let mut expected = std::collections::BTreeMap::new();
            for (device, (slot, total_vfs)) in (0u32..).zip(plugs) {
                let Ok(placement) = topology.place(slot, total_vfs) else { continue };
                topology.plug(placement, device).unwrap();
                prop_assert_eq!(expected.insert(placement.rid, device), None);
                let vfs = placement.vfs.unwrap_or(VfPlacement { total_vfs: 0, first_vf_offset: 0, vf_stride: 0 });
                for index in 0..vfs.total_vfs {
                    let rid = placement.rid.checked_add(vfs.first_vf_offset + index * vfs.vf_stride).unwrap();
                    prop_assert!(rid.bus() >= 1 && rid.bus() <= 127);
                    prop_assert_eq!(expected.insert(rid, device), None);
                }
            }
            for (rid, device) in expected {
                prop_assert_eq!(topology.lookup(rid), Some(&device));
            }
        }
    }
}
