//! The PCI segment as vCPUs see it: configuration space and device windows.

use std::sync::Arc;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use pci::{ConfigPorts, Placement, Rid, Topology, TopologyError, ecam_read, ecam_write};

use crate::arch::x86_64::layout;
use crate::kvm::Vm;
use crate::pci_host::assign_bars::{Apertures, NoRoom, place_bars};
use crate::pci_host::slot::{PciHost, Slot};
use crate::vcpu::cpu::MmioHandler;

/// The devices in their places.
///
/// vCPUs read a snapshot without a lock; plugging and unplugging replace it.
pub struct Bus {
    host: Arc<PciHost>,
    topology: ArcSwap<Topology<Arc<Slot>>>,
    writer: Mutex<()>,
}

impl Bus {
    /// A segment without devices.
    pub fn new() -> Self {
        let topology = ArcSwap::from_pointee(Topology::new(layout::LAST_BUS));
        Self { host: Arc::default(), topology, writer: Mutex::new(()) }
    }

    /// What the slots of this segment share.
    pub fn host(&self) -> &Arc<PciHost> {
        &self.host
    }

    /// The place for a device with `total_vfs` VFs: in `slot`, or in the lowest free one from 1.
    ///
    /// # Errors
    ///
    /// When that place is taken, or no place is left.
    pub fn place(&self, slot: Option<u8>, total_vfs: u16) -> Result<Placement, TopologyError> {
        self.topology.load().place(slot, total_vfs)
    }

    /// Shows a device, which is in the state of power-on, to the guest.
    ///
    /// # Errors
    ///
    /// When its place is taken.
    pub fn plug(&self, placement: Placement, slot: Arc<Slot>) -> Result<(), TopologyError> {
        self.change(|topology| topology.plug(placement, slot))
    }

    /// Takes the device at `rid` from the guest, ends all that it does, and removes its wires.
    pub fn unplug(&self, rid: Rid) -> Option<Arc<Slot>> {
        let slot = self.change(|topology| topology.unplug(rid))?;
        slot.retire();
        Some(slot)
    }

    fn change<T>(&self, change: impl FnOnce(&mut Topology<Arc<Slot>>) -> T) -> T {
        let _writer = self.writer.lock();
        let mut topology = Topology::clone(&self.topology.load());
        let result = change(&mut topology);
        self.topology.store(Arc::new(topology));
        result
    }

    /// Wires the devices to `vm`, in their state of power-on and with addresses in `apertures` in their BARs. Without
    /// apertures, the BARs are left to firmware.
    ///
    /// # Errors
    ///
    /// When the BARs need more addresses than there are.
    pub fn attach(&self, vm: Arc<Vm>, apertures: Option<Apertures>) -> Result<(), NoRoom> {
        self.host.set_wiring(Some(Box::new(vm)));
        apertures.map_or(Ok(()), |apertures| place_bars(&self.topology.load(), apertures))
    }

    /// Reads `data.len()` bytes at port `CF8h + offset`.
    pub fn read_by_ports(&self, ports: &ConfigPorts, offset: u16, data: &mut [u8]) {
        ports.read(&self.topology.load(), offset.into(), data);
    }

    /// Writes `data` at port `CF8h + offset`.
    pub fn write_by_ports(&self, ports: &mut ConfigPorts, offset: u16, data: &[u8]) {
        ports.write(&self.topology.load(), offset.into(), data);
    }

    /// Resets the devices, so that none of them touches the guest's memory any more, and cuts their wires to the VM.
    /// Its vCPUs must have stopped.
    pub fn detach(&self) {
        let topology = self.topology.load();
        for (_, slot) in topology.iter() {
            slot.reset();
        }
        self.host.set_wiring(None);
        for (_, slot) in topology.iter() {
            slot.forget_wiring();
        }
    }
}

impl MmioHandler for Bus {
    fn read(&self, address: u64, data: &mut [u8]) {
        if layout::ECAM.contains(&address) {
            return ecam_read(&self.topology.load(), address - layout::ECAM.start, data);
        }
        match self.host.mmio.find(address) {
            Some((slot, window, offset)) => slot.mmio_read(window, offset, data),
            None => data.fill(0xff),
        }
    }

    fn write(&self, address: u64, data: &[u8]) {
        if layout::ECAM.contains(&address) {
            return ecam_write(&self.topology.load(), address - layout::ECAM.start, data);
        }
        if let Some((slot, window, offset)) = self.host.mmio.find(address) {
            slot.mmio_write(window, offset, data);
        }
    }
}
