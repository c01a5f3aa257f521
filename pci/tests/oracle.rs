//! The oracles of the property tests and fuzz targets work: the invariants or the model detect each fault of a device.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::convert::Infallible;

use pci_sriov::testing::{Model, Observed, Op, Target};
use pci_sriov::{
    BarIndex, Device, Dword, DwordWrite, MemoryKind, Outcome, PfWithVfs, ResetKind, Rid, Window, WindowId,
};

mod bare;
use bare::{Bare, PF};

/// Fault of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lie {
    None,
    /// A register of the PF reads with these bits inverted.
    Register(u16, u32),
    /// A register of every VF reads with these bits inverted.
    OfVfs(u16, u32),
    /// The first VF that does not exist responds.
    OneTooMany,
    /// The last VF that exists does not respond.
    OneTooFew,
    /// A VF BAR's window is elsewhere.
    Base(u64),
    /// The window has another length.
    Len(u64),
    /// The window is missing.
    NoWindow,
    /// The upper half of a VF BAR decodes.
    UpperHalf,
}

struct Liar {
    honest: PfWithVfs<Bare>,
    lie: Lie,
}

impl Device for Liar {
    type Stopping = Infallible;

    fn config_read(&self, rid: Rid, reg: Dword) -> u32 {
        let truth = |rid| self.honest.config_read(rid, reg);
        let visible = self.honest.sriov().unwrap().num_visible();
        match self.lie {
            Lie::Register(offset, bits) if rid == PF && reg.offset() == offset => truth(rid) ^ bits,
            Lie::OfVfs(offset, bits) if (0x100..0x100 + visible).contains(&rid.to_bits()) && reg.offset() == offset => {
                truth(rid) ^ bits
            }
            Lie::OneTooMany if rid.to_bits() == 0x100 + visible => truth(Rid::from_bits(0x100)),
            Lie::OneTooFew if rid.to_bits() + 1 == 0x100 + visible => u32::MAX,
            _ => truth(rid),
        }
    }

    fn config_write(&mut self, rid: Rid, reg: Dword, write: DwordWrite) -> Outcome<Infallible> {
        self.honest.config_write(rid, reg, write)
    }

    fn mmio_read(&mut self, window: WindowId, offset: u64, data: &mut [u8]) {
        self.honest.mmio_read(window, offset, data);
    }

    fn mmio_write(&mut self, window: WindowId, offset: u64, data: &[u8]) -> Outcome<Infallible> {
        self.honest.mmio_write(window, offset, data)
    }

    fn may_send(&self, rid: Rid) -> bool {
        self.honest.may_send(rid)
    }

    fn windows(&self, out: &mut Vec<Window>) {
        self.honest.windows(out);
        let id = |n: usize| WindowId::VfBar(BarIndex::ALL[n]);
        match self.lie {
            Lie::NoWindow => out.retain(|window| window.id != id(2)),
            Lie::UpperHalf => {
                out.push(Window { id: id(3), base: 0x9000_0000, len: 0x1000, kind: MemoryKind::Memory32 })
            }
            lie => {
                for window in out.iter_mut().filter(|window| window.id == id(2)) {
                    match lie {
                        Lie::Base(base) => window.base = base,
                        Lie::Len(len) => window.len = len,
                        _ => {}
                    }
                }
            }
        }
    }

    fn reset(&mut self, kind: ResetKind) -> Outcome<Infallible> {
        self.honest.reset(kind)
    }
}

const LIES: [Lie; 14] = [
    Lie::Register(0x104, 2),
    Lie::Register(0x108, 0x10),
    Lie::Register(0x108, 1 << 16),
    Lie::Register(0x10c, 1 << 16),
    Lie::Register(0x114, 1),
    Lie::Register(0x120, 2),
    Lie::Register(0x12c, 0x2000),
    Lie::OfVfs(0x04, 2),
    Lie::OneTooMany,
    Lie::OneTooFew,
    Lie::Base(0x4000_2000),
    Lie::Len(4 * 0x2000),
    Lie::NoWindow,
    Lie::UpperHalf,
];

/// A correct device with three of eight VFs enabled and its VF BARs placed, and its model.
fn in_use() -> (Observed<Liar>, Model) {
    let mut honest = Bare::with_vfs(8).device;
    let mut model = Model::new(&mut honest, PF);
    let mut observed = Observed::new(Liar { honest, lie: Lie::None }, PF);
    let write = |offset, value| Op::ConfigWrite { target: Target::Pf, offset, len: 4, value };
    for op in [write(0x12c, 0x4000_0000), write(0x134, 0x5000_0000), write(0x110, 3), write(0x108, 9)] {
        let _ = observed.apply(op);
        model.apply(op);
    }
    (observed, model)
}

#[test]
fn an_honest_device_keeps_the_invariants_and_is_as_its_model() {
    let (observed, model) = in_use();
    assert_eq!((observed.check(), model.compare(&observed.device, PF)), (Ok(()), Ok(())));
}

#[test]
fn a_device_that_lies_breaks_an_invariant() {
    for lie in LIES {
        let (mut observed, _) = in_use();
        observed.device.lie = lie;
        assert!(observed.check().is_err(), "{lie:?}");
    }
}

#[test]
fn a_device_that_lies_differs_from_its_model() {
    let subtle = [Lie::Register(0x3c, 0x100), Lie::OfVfs(0, 1), Lie::OfVfs(0x3c, 0x100), Lie::Len(3 * 0x1000)];
    for lie in LIES.into_iter().chain(subtle) {
        let (mut observed, model) = in_use();
        observed.device.lie = lie;
        let Err(difference) = model.compare(&observed.device, PF) else { panic!("{lie:?} is not seen") };
        assert!(difference.contains("expected"), "{lie:?}: {difference}");
    }
}

#[test]
fn only_registers_that_an_operation_touched_are_compared() {
    let (mut observed, model) = in_use();
    observed.device.lie = Lie::OfVfs(0x04, 2);
    let read = |target, offset| Op::ConfigRead { target, offset, len: 4 };
    let differs = |op| model.compare_after(op, &observed.device, PF).is_err();
    let found = [read(Target::Vf(2), 4), read(Target::Vf(2), 8), read(Target::Vf(3), 4), read(Target::Vf(8), 4)];
    assert_eq!(found.map(differs), [true, false, false, false]);
}
