//! The least that a PF with VFs can be: configuration spaces, and MSI-X in BAR 4.

use pci::testing::Observed;
use pci::{
    BarIndex, BarKind, ConfigShape, ConfigSpace, Device, Dword, DwordWrite, Effects, Identity, MsixShape, ResetKind,
    Rid, Role, SriovShape, VfChange, VfIndex, Window, WindowId,
};

/// The PF: slot 3 of bus 0. Its VFs are on bus 1 and behind.
pub const PF: Rid = Rid::from_bits(3 << 3);

fn bars() -> Vec<(BarIndex, BarKind)> {
    let bar = |n| BarIndex::new(n).unwrap();
    vec![
        (bar(0), BarKind::Memory32 { size: 0x400 }),
        (bar(2), BarKind::Memory64 { size: 0x2000, prefetchable: true }),
        (bar(4), BarKind::Memory64 { size: 0x1000, prefetchable: true }),
    ]
}

/// A function as it is at power-on.
pub fn space(role: Role) -> ConfigSpace {
    let table = (BarIndex::new(4).unwrap(), 0);
    let pba = (BarIndex::new(4).unwrap(), 0x800);
    ConfigSpace::new(ConfigShape {
        identity: Identity {
            vendor: 0x1af4,
            device: 0x1041,
            revision: 1,
            class: [2, 0, 0],
            subsystem_vendor: 0x1af4,
            subsystem: 0x1041,
        },
        bars: if role == Role::Vf { Vec::new() } else { bars() },
        role,
        vendor: Vec::new(),
        msix: MsixShape { vectors: 3, table, pba },
    })
    .unwrap()
}

/// A PF and its VFs.
pub struct Bare {
    pub pf: ConfigSpace,
    pub vfs: Vec<ConfigSpace>,
}

impl Bare {
    /// No VF is enabled.
    pub fn new(total_vfs: u16) -> Observed<Self> {
        let shape = SriovShape {
            total_vfs,
            first_vf_offset: 0xe8,
            vf_stride: 1,
            vf_device_id: 0x1041,
            bars: bars(),
            function_dependency_link: 0,
        };
        let vfs = (0..total_vfs).map(|_| space(Role::Vf)).collect();
        Observed::new(Self { pf: space(Role::Pf(shape)), vfs }, PF)
    }

    fn index(&self, rid: Rid) -> Option<usize> {
        self.pf.sriov()?.vf_index(PF, rid).map(|VfIndex(index)| index.into())
    }

    /// The function that byte `offset` of a window belongs to, and the offset in its BAR.
    fn slice(&mut self, window: WindowId, offset: u64) -> Option<(&mut ConfigSpace, u64)> {
        match window {
            WindowId::Bar(bar) if bar.get() == 4 => Some((&mut self.pf, offset)),
            WindowId::VfBar(bar) if bar.get() == 4 => {
                let (VfIndex(index), offset) = self.pf.sriov()?.locate(bar, offset)?;
                Some((&mut self.vfs[usize::from(index)], offset))
            }
            _ => None,
        }
    }

    fn settle(&mut self, effects: Effects) -> Effects {
        if let Some(VfChange::Disabled { num_vfs }) = effects.vfs {
            for vf in &mut self.vfs[..usize::from(num_vfs)] {
                let _ = vf.reset(ResetKind::Conventional);
            }
        }
        effects
    }
}

impl Device for Bare {
    fn config_read(&self, rid: Rid, reg: Dword) -> u32 {
        match self.index(rid) {
            Some(index) => self.vfs[index].read(reg),
            None if rid == PF => self.pf.read(reg),
            None => u32::MAX,
        }
    }

    fn config_write(&mut self, rid: Rid, reg: Dword, write: DwordWrite) -> Effects {
        match self.index(rid) {
            Some(index) => self.vfs[index].write(reg, write),
            None if rid == PF => {
                let effects = self.pf.write(reg, write);
                self.settle(effects)
            }
            None => Effects::NONE,
        }
    }

    fn mmio_read(&mut self, window: WindowId, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        if let Some((function, offset)) = self.slice(window, offset) {
            function.msix().table_read(offset, data);
        }
    }

    fn mmio_write(&mut self, window: WindowId, offset: u64, data: &[u8]) -> Effects {
        self.slice(window, offset)
            .map_or(Effects::NONE, |(function, offset)| function.msix_mut().table_write(offset, data))
    }

    fn windows(&self, out: &mut Vec<Window>) {
        self.pf.windows(out);
    }

    fn reset(&mut self, kind: ResetKind) -> Effects {
        let effects = self.pf.reset(kind);
        self.settle(effects)
    }
}
