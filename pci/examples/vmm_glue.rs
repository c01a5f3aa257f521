//! The glue of a small VMM: a NIC with 300 VFs, on two buses of their own, behind the VMM's own lock. The crate has all
//! rules of SR-IOV; the VMM adds a function, a lock, and the handling of a vCPU's exit.
use parking_lot::Mutex;
use pci_sriov::spec::{header::FIRST_EXTENDED_CAPABILITY as SRIOV, sriov};
use pci_sriov::*;

const BAR: (BarIndex, BarKind) = (BarIndex::ALL[0], BarKind::Memory32 { size: 0x1000 });

/// A function, PF or VF, with one register in BAR 0.
struct Nic(ConfigSpace, u8);

fn nic(role: Role) -> Result<Nic, ShapeError> {
    let identity = Identity { vendor: 1, device: 2, revision: 0, class: [2, 0, 0], subsystem_vendor: 1, subsystem: 2 };
    // A VF's BARs belong to its PF, so its own are left out.
    Ok(Nic(ConfigSpace::new(ConfigShape { bars: vec![BAR], ..ConfigShape::new(identity, role) })?, 0))
}

impl Function for Nic {
    type Stopping = (); // A worker's handle, in a NIC that has workers.
    fn config(&self) -> &ConfigSpace {
        &self.0
    }
    fn config_mut(&mut self) -> &mut ConfigSpace {
        &mut self.0
    }
    fn changed(&mut self, effects: Effects, _powered: bool) -> Outcome<()> {
        self.1 = if effects.reset.is_some() { 0 } else { self.1 };
        effects.into()
    }
    fn bar_read(&mut self, _bar: BarIndex, _offset: u64, data: &mut [u8]) {
        data.fill(self.1);
    }
    fn bar_write(&mut self, _bar: BarIndex, _offset: u64, data: &[u8], _powered: bool) -> Outcome<()> {
        self.1 = data.first().copied().unwrap_or(self.1);
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

/// A guest's access to an address: writes `value` if it has a byte, and reads; all-ones if no window is decoded.
fn mmio(slot: &Slot, address: u64, value: &[u8]) -> u8 {
    let (mut device, mut windows, mut data) = (slot.0.lock(), Vec::new(), [0xff]);
    device.windows(&mut windows);
    if let Some(w) = windows.iter().find(|w| (w.base..w.base + w.len).contains(&address)) {
        let _outcome = device.mmio_write(w.id, address - w.base, value);
        device.mmio_read(w.id, address - w.base, &mut data);
    }
    data[0]
}
#[cfg_attr(test, test)]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut topology = Topology::new(127);
    let place = topology.place(None, 300)?;
    let shape = SriovShape::new(place.rid, place.vfs.ok_or("no VFs")?, 2, vec![BAR]);
    let (pf, vfs) = (nic(Role::Pf(shape))?, (0..300).map(|_| nic(Role::Vf)).collect::<Result<_, _>>()?);
    topology.plug(place, Slot(PfWithVfs::new(place.rid, pf, vfs)?.into()))?;
    let (slot, pf) = (topology.lookup(place.rid).ok_or("no device")?, u64::from(place.rid.to_bits()) << 12);
    let write = |at: u16, value: u32| ecam_write(&topology, pf + u64::from(SRIOV + at), &value.to_le_bytes());
    let slices = |value| [(299, value), (0, &[][..]), (300, &[])].map(|(n, v)| mmio(slot, 0x4000_0000 + (n << 12), v));
    write(sriov::VF_BAR0, 0x4000_0000);
    write(sriov::NUM_VFS_FDL, 300);
    write(sriov::CONTROL_STATUS, 9);
    assert_eq!(slices(&[7]), [7, 0, 0xff], "VF 299's register, VF 0's, and neither's");
    [0, 9].into_iter().for_each(|control| write(sriov::CONTROL_STATUS, control));
    assert_eq!(slices(&[]), [0, 0, 0xff], "VFs that are enabled again are new");
    let _outcome = slot.0.lock().reset(ResetKind::Conventional);
    assert_eq!(slices(&[7]), [0xff; 3], "the PF's reset took them away");
    Ok(())
}
