//! The PCI segments as vCPUs see them: configuration space and device windows.

use std::sync::Arc;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use pci::{Bdf, ConfigPorts, Placement, Topology, TopologyError, ecam_read, ecam_write};

use crate::arch::x86_64::layout;
use crate::exits::MmioHandler;
use crate::kvm::Vm;
use crate::pci_host::assign_bars::{NoRoom, hand_over, place_bars};
use crate::pci_host::slot::{PciHost, Slot};
use crate::pci_layout::{Apertures, RootBus};

/// The devices in their places.
///
/// vCPUs read a snapshot without a lock; plugging and unplugging replace it.
pub struct Bus {
    host: Arc<PciHost>,
    /// By number.
    segments: Vec<ArcSwap<Topology<Arc<Slot>>>>,
    /// Further root buses of segment 0.
    roots: Vec<RootBus>,
    writer: Mutex<()>,
}

impl Bus {
    /// Segments 0 to `segments` - 1 without devices. Segment 0 has these further root buses, by ascending numbers.
    pub fn new(segments: u16, roots: Vec<RootBus>) -> Self {
        let topology = |segment| {
            let further = roots.iter().map(|root| root.bus).filter(|_| segment == 0);
            let topology = Topology::of_segment(segment, layout::last_bus(segment)).with_root_buses(further);
            ArcSwap::from_pointee(topology)
        };
        let segments = (0..segments).map(topology).collect();
        Self { host: Arc::default(), segments, roots, writer: Mutex::new(()) }
    }

    /// The further root buses of segment 0.
    pub fn roots(&self) -> &[RootBus] {
        &self.roots
    }

    /// State that the slots of all segments share.
    pub fn host(&self) -> &Arc<PciHost> {
        &self.host
    }

    fn segment(&self, segment: u16) -> Option<&ArcSwap<Topology<Arc<Slot>>>> {
        self.segments.get(usize::from(segment))
    }

    /// The place for a device with `total_vfs` VFs on a root bus of a segment: in `slot`, or in the lowest free one
    /// from 1.
    ///
    /// # Errors
    ///
    /// Fails if that place is taken, no place is left, or the segment does not exist.
    pub fn place(
        &self,
        (segment, root): (u16, u8),
        slot: Option<u8>,
        total_vfs: u16,
    ) -> Result<Placement, TopologyError> {
        self.segment(segment).ok_or(TopologyError::NoSlot)?.load().place_on(root, slot, total_vfs)
    }

    /// The place of a device with `total_vfs` VFs where it was before: in `slot` of a root bus of a segment, its VFs
    /// from the bus `first_vf_bus` on.
    ///
    /// # Errors
    ///
    /// Fails if that place is taken, or there is none.
    pub fn place_at(
        &self,
        (segment, root): (u16, u8),
        slot: u8,
        first_vf_bus: Option<u8>,
        total_vfs: u16,
    ) -> Result<Placement, TopologyError> {
        self.segment(segment).ok_or(TopologyError::NoSlot)?.load().place_at(root, slot, first_vf_bus, total_vfs)
    }

    /// Shows a device to the guest in its state of power-on.
    ///
    /// # Errors
    ///
    /// Fails if its place is taken.
    pub fn plug(&self, placement: Placement, slot: Arc<Slot>) -> Result<(), TopologyError> {
        self.change(placement.segment, |topology| topology.plug(placement, slot)).ok_or(TopologyError::NoSlot)?
    }

    /// Removes the device whose own function is at `address` from the guest, stops it, and removes its wires.
    pub fn unplug(&self, address: Bdf) -> Option<Arc<Slot>> {
        let slot = self.change(address.segment, |topology| topology.unplug(address.rid))??;
        slot.retire();
        Some(slot)
    }

    fn change<T>(&self, segment: u16, change: impl FnOnce(&mut Topology<Arc<Slot>>) -> T) -> Option<T> {
        let _writer = self.writer.lock();
        let segment = self.segment(segment)?;
        let mut topology = Topology::clone(&segment.load());
        let result = change(&mut topology);
        segment.store(Arc::new(topology));
        Some(result)
    }

    /// Wires the devices to `vm`, in their state of power-on and with addresses in their BARs; `apertures` are those of
    /// each segment, and the root buses of segment 0 share its own. Firmware sees only segment 0, whose devices are in
    /// the state that a platform's firmware leaves.
    ///
    /// # Errors
    ///
    /// Fails if the BARs of a segment need more addresses than it has, except segment 0 under firmware.
    pub fn attach(&self, vm: Arc<Vm>, apertures: &[Apertures], has_firmware: bool) -> Result<(), NoRoom> {
        self.host.set_wiring(Some(Box::new(vm)));
        let mut segments = (0..).zip(&self.segments).zip(apertures);
        segments.try_for_each(|((number, topology), apertures): ((u16, _), _)| {
            let further = self.roots.iter().map(|root| root.bus).filter(|_| number == 0);
            let roots: Vec<_> = [0].into_iter().chain(further).collect();
            let shares = apertures.split_among_roots(roots.len() - 1);
            roots.into_iter().zip(shares).try_for_each(|(root, share)| {
                if number == 0 && has_firmware {
                    hand_over(&topology.load(), root, share);
                    return Ok(());
                }
                place_bars(&topology.load(), root, share)
            })
        })
    }

    /// Wires the devices to `vm` as their registers require, whatever state they are in.
    pub fn attach_as_is(&self, vm: Arc<Vm>) {
        self.host.set_wiring(Some(Box::new(vm)));
        for topology in &self.segments {
            topology.load().iter().for_each(|(_, slot)| slot.reconcile());
        }
    }

    /// Reads `data.len()` bytes at port `CF8h + offset`. These ports reach segment 0 only.
    pub fn read_by_ports(&self, ports: &ConfigPorts, offset: u16, data: &mut [u8]) {
        match self.segment(0) {
            Some(topology) => ports.read(&topology.load(), offset.into(), data),
            None => data.fill(0xff),
        }
    }

    /// Writes `data` at port `CF8h + offset`.
    pub fn write_by_ports(&self, ports: &mut ConfigPorts, offset: u16, data: &[u8]) {
        if let Some(topology) = self.segment(0) {
            ports.write(&topology.load(), offset.into(), data);
        }
    }

    /// Resets the devices, so that none of them accesses the guest's memory, and forgets their wires to the VM, which
    /// are removed when it is closed. Its vCPUs must have stopped.
    pub fn detach(&self) {
        let segments: Vec<_> = self.segments.iter().map(|topology| topology.load()).collect();
        // KVM waits for a grace period for each wire that is removed on its own: with 8 VFs, longer than a client
        // should wait for an answer.
        self.host.set_wiring(None);
        for (_, slot) in segments.iter().flat_map(|topology| topology.iter()) {
            slot.reset();
        }
        for (_, slot) in segments.iter().flat_map(|topology| topology.iter()) {
            slot.forget_wiring();
        }
    }
}

impl MmioHandler for Bus {
    fn read(&self, address: u64, data: &mut [u8]) {
        if let Some((segment, offset)) = layout::ecam_offset(address) {
            return match self.segment(segment) {
                Some(topology) => ecam_read(&topology.load(), offset, data),
                None => data.fill(0xff),
            };
        }
        match self.host.mmio.find(address) {
            Some((slot, window, offset)) => slot.mmio_read(window, offset, data),
            None => data.fill(0xff),
        }
    }

    fn write(&self, address: u64, data: &[u8]) {
        if let Some((segment, offset)) = layout::ecam_offset(address) {
            if let Some(topology) = self.segment(segment) {
                ecam_write(&topology.load(), offset, data);
            }
            return;
        }
        if let Some((slot, window, offset)) = self.host.mmio.find(address) {
            slot.mmio_write(window, offset, data);
        }
    }
}
