//! The glue of a small VMM: a NIC with 300 VFs and MSI-X, on two buses of their own, behind the VMM's own lock. The
//! crate has all rules of SR-IOV and MSI-X; the VMM adds a function, a lock, and the handling of a vCPU's exit.
use parking_lot::Mutex;
use pci_sriov::spec::{header::FIRST_EXTENDED_CAPABILITY as SRIOV, sriov};
use pci_sriov::*;

const BAR: (BarIndex, BarKind) = (BarIndex::ALL[0], BarKind::Memory32 { size: 0x1000 });
const MSIX: MsixShape = MsixShape { vectors: 1, table: (BAR.0, 0x400), pba: (BAR.0, 0x800) };

/// A function, PF or VF: a register at the start of BAR 0, which raises an interrupt when it is written.
struct Nic {
    config: ConfigSpace,
    register: u8,
    pending: PendingBits,
    /// The messages for the VMM to deliver.
    sent: Vec<(u64, u32)>,
}

fn nic(role: Role) -> Result<Nic, ShapeError> {
    let identity = Identity { vendor: 1, device: 2, revision: 0, class: [2, 0, 0], subsystem_vendor: 1, subsystem: 2 };
    // The BARs of a VF are the VF BARs of its PF.
    let (bars, msix) = (vec![BAR], Some(MSIX));
    let config = ConfigSpace::new(ConfigShape { bars, msix, ..ConfigShape::new(identity, role) })?;
    Ok(Nic { register: 0, pending: PendingBits::new(&config), sent: Vec::new(), config })
}

impl Function for Nic {
    type Stopping = (); // A worker's handle, in a NIC that has workers.
    fn config(&self) -> &ConfigSpace {
        &self.config
    }
    fn config_mut(&mut self) -> &mut ConfigSpace {
        &mut self.config
    }
    fn changed(&mut self, effects: Effects, powered: bool) -> Outcome<()> {
        if effects.reset.is_some() {
            self.register = 0;
            self.pending.clear();
        }
        if effects.messages {
            self.sent.extend(self.pending.take_sendable(&self.config, powered));
        }
        effects.into()
    }
    fn bar_read(&mut self, bar: BarIndex, offset: u64, data: &mut [u8]) {
        if !self.config.msix_read(bar, offset, data, |vector| self.pending.contains(vector)) {
            data.fill(self.register);
        }
    }
    fn bar_write(&mut self, bar: BarIndex, offset: u64, data: &[u8], powered: bool) -> Outcome<()> {
        if let Some(effects) = self.config.msix_write(bar, offset, data) {
            return self.changed(effects, powered);
        }
        if let Some(value) = data.first() {
            self.register = *value;
            self.sent.extend(self.pending.raise(0, &self.config, powered));
        }
        Outcome::none()
    }
}

/// The device and its lock. After releasing it, the VMM joins what an outcome stopped, and wires what it reached.
struct Slot(Mutex<PfWithVfs<Nic>>);

impl ConfigTarget for Slot {
    fn config_read(&self, rid: Rid, reg: Dword) -> u32 {
        self.0.lock().config_read(rid, reg)
    }
    fn config_write(&self, rid: Rid, reg: Dword, write: DwordWrite) {
        let _outcome = self.0.lock().config_write(rid, reg, write);
    }
}

/// A guest's access to an address: writes `value` if it has bytes, and reads; all-ones if no window is decoded.
fn mmio(slot: &Slot, address: u64, value: &[u8]) -> u8 {
    let (mut device, mut windows, mut data) = (slot.0.lock(), Vec::new(), [0xff]);
    device.windows(&mut windows);
    if let Some(w) = windows.iter().find(|w| (w.base..w.base + w.len).contains(&address)) {
        if !value.is_empty() {
            let _outcome = device.mmio_write(w.id, address - w.base, value);
        }
        device.mmio_read(w.id, address - w.base, &mut data);
    }
    data[0]
}
#[cfg_attr(test, test)]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut topology = Topology::new(127);
    let place = topology.place(None, 300)?;
    let vfs = place.vfs.ok_or("no VFs")?;
    let shape = SriovShape::new(place.rid, vfs, 2, vec![BAR]);
    let (pf, all) = (nic(Role::Pf(shape))?, (0..300).map(|_| nic(Role::Vf)).collect::<Result<_, _>>()?);
    topology.plug(place, Slot(PfWithVfs::new(place.rid, pf, all)?.into()))?;
    let slot = topology.lookup(place.rid).ok_or("no device")?;
    let config = |rid: Rid, at: u16, value: u32| {
        ecam_write(&topology, u64::from(rid.to_bits()) << 12 | u64::from(at), &value.to_le_bytes());
    };
    let write = |at: u16, value: u32| config(place.rid, SRIOV + at, value);
    let slices = |value| [(299, value), (0, &[][..]), (300, &[])].map(|(n, v)| mmio(slot, 0x4000_0000 + (n << 12), v));
    write(sriov::VF_BAR0, 0x4000_0000);
    write(sriov::NUM_VFS_FDL, 300);
    write(sriov::CONTROL_STATUS, 9);
    assert_eq!(slices(&[7]), [7, 0, 0xff], "VF 299's register, VF 0's, and neither's");

    // VF 299 has raised its interrupt, which waits. Its driver enables MSI-X and unmasks the vector.
    let (last, at) = (vfs.vf_rid(place.rid, VfIndex(299)), 0x4000_0000 + (299 << 12));
    let msix = slot.0.lock().function(last).and_then(|vf| vf.config().msix_offset()).ok_or("no MSI-X")?;
    assert_eq!(mmio(slot, at + 0x800, &[]), 1, "its pending bit");
    config(last, 4, 4);
    config(last, msix, 0x8000_0000);
    mmio(slot, at + 0x400, &0xfee0_0000_u64.to_le_bytes());
    mmio(slot, at + 0x408, &0x41_u64.to_le_bytes());
    let sent = slot.0.lock().vf_mut(VfIndex(299)).map(|vf| std::mem::take(&mut vf.sent));
    assert_eq!(sent, Some(vec![(0xfee0_0000, 0x41)]), "sent once, when it was unmasked");
    assert_eq!(mmio(slot, at + 0x800, &[]), 0, "no longer pending");
    assert!(slot.0.lock().may_send(last) && !slot.0.lock().may_send(place.rid), "by each function's bus master");

    [0, 9].into_iter().for_each(|control| write(sriov::CONTROL_STATUS, control));
    assert_eq!(slices(&[]), [0, 0, 0xff], "VFs that are enabled again are new");
    let _outcome = slot.0.lock().reset(ResetKind::Conventional);
    assert_eq!(slices(&[7]), [0xff; 3], "the PF's reset took them away");
    Ok(())
}
