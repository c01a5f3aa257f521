//! The SR-IOV capability alone, compared with a second implementation of its rules.
//!
//! The first bytes choose the shape of the capability, which may be invalid. Writes of any bytes of any register
//! follow, with resets and restores. After each of them, every register must read as expected, and the VFs, their
//! routing IDs, windows and slices must follow from the registers.

use pci::{
    BarIndex, BarKind, Dword, DwordWrite, MemoryKind, PortType, Refused, ResetKind, Rid, Sriov, SriovShape, SriovState,
    VfChange, VfIndex, Window, WindowId,
};

use crate::input::{Input, Seed};

const PF: Rid = Rid::from_bits(3 << 3);

// The registers, by dword (`PCIe 6.2 §9.3.3`).
const CONTROL: usize = 2;
const NUM_VFS: usize = 4;
const PAGE_SIZE: usize = 8;
const VF_BAR0: usize = 9;
/// Number of dwords that are accessed: one more than the capability has.
const DWORDS: usize = 17;

const VF_ENABLE: u32 = 1;
const VF_MSE: u32 = 8;
const PAGE_SIZES: u32 = 0x553;

// The kinds of operation.
const WRITE: u8 = 0;
const RESET: u8 = 1;
const RESTORE: u8 = 2;
const SAVE: u8 = 3;
const LOOK_UP: u8 = 4;
const KINDS: u8 = 5;

/// The kind of a VF BAR register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Register {
    Unused,
    Low { size: u64, is_64: bool, type_bits: u32 },
    High { size: u64 },
}

/// The second implementation of the rules.
#[derive(Debug, Clone)]
struct Rules {
    shape: SriovShape,
    registers: [Register; 6],
    control: u32,
    num_vfs: u32,
    page_size: u32,
    bars: [u32; 6],
}

impl Rules {
    /// The rules for a shape, or `None` if the shape is invalid.
    fn new(shape: SriovShape) -> Option<Self> {
        let SriovShape { total_vfs, first_vf_offset, vf_stride, .. } = shape;
        let last = u64::from(first_vf_offset) + u64::from(vf_stride) * u64::from(total_vfs.checked_sub(1)?);
        if first_vf_offset == 0 || (vf_stride == 0 && total_vfs > 1) || last > 0xffff {
            return None;
        }
        let mut registers = [Register::Unused; 6];
        for &(index, kind) in &shape.bars {
            let (size, is_64, type_bits) = match kind {
                BarKind::Memory32 { size } => (u64::from(size), false, 0),
                BarKind::Memory64 { size, prefetchable } => (size, true, if prefetchable { 0xc } else { 4 }),
            };
            if size < 128 || size.count_ones() != 1 {
                return None;
            }
            // All VFs have an address.
            let all = u128::from(size.max(0x1000)) * u128::from(total_vfs);
            if all > if is_64 { 1 << 64 } else { 1 << 32 } {
                return None;
            }
            let n = usize::from(index.get());
            let parts = [Some(Register::Low { size, is_64, type_bits }), is_64.then_some(Register::High { size })];
            for (n, part) in (n..).zip(parts.into_iter().flatten()) {
                let register = registers.get_mut(n).filter(|register| **register == Register::Unused)?;
                *register = part;
            }
        }
        Some(Self { shape, registers, control: 0, num_vfs: 0, page_size: 1, bars: [0; 6] })
    }

    /// The values that software can change.
    fn registers(&self) -> (u32, u32, u32, [u32; 6]) {
        (self.control, self.num_vfs, self.page_size, self.bars)
    }

    fn enabled(&self) -> bool {
        self.control & VF_ENABLE != 0
    }

    fn visible(&self) -> u16 {
        if self.enabled() { self.num_vfs as u16 } else { 0 }
    }

    fn reset(&mut self) {
        (self.control, self.num_vfs, self.page_size, self.bars) = (0, 0, 1, [0; 6]);
    }

    fn read(&self, dword: usize) -> u32 {
        let SriovShape { total_vfs, first_vf_offset, vf_stride, vf_device_id, function_dependency_link, .. } =
            self.shape;
        let pair = |low: u16, high: u16| u32::from(high) << 16 | u32::from(low);
        match dword {
            0 => 0x0001_0010,
            CONTROL => self.control,
            3 => pair(total_vfs, total_vfs),
            NUM_VFS => self.num_vfs | u32::from(function_dependency_link) << 16,
            5 => pair(first_vf_offset, vf_stride),
            6 => pair(0, vf_device_id),
            7 => PAGE_SIZES,
            PAGE_SIZE => self.page_size,
            VF_BAR0..15 => match self.registers[dword - VF_BAR0] {
                Register::Low { type_bits, .. } => self.bars[dword - VF_BAR0] | type_bits,
                _ => self.bars[dword - VF_BAR0],
            },
            _ => 0,
        }
    }

    fn slice(&self, size: u64) -> u64 {
        size.max(u64::from(self.page_size) << 12)
    }

    /// Writes those bytes of `value` that are set in `enables`.
    fn write(&mut self, dword: usize, value: u32, enables: u8) {
        let mut bytes = self.read(dword).to_le_bytes();
        for (n, byte) in value.to_le_bytes().into_iter().enumerate().filter(|(n, _)| enables >> n & 1 == 1) {
            bytes[n] = byte;
        }
        let new = u32::from_le_bytes(bytes);
        match dword {
            CONTROL => {
                let mut control = new & (VF_ENABLE | VF_MSE);
                if !self.enabled() && self.num_vfs > u32::from(self.shape.total_vfs) {
                    control &= !VF_ENABLE;
                }
                self.control = control;
            }
            NUM_VFS if !self.enabled() => self.num_vfs = new & 0xffff,
            PAGE_SIZE if !self.enabled() && new.count_ones() == 1 && new & PAGE_SIZES != 0 && new != self.page_size => {
                self.page_size = new;
                for n in 0..6 {
                    self.bars[n] &= self.address_bits(n);
                }
            }
            VF_BAR0..15 => self.bars[dword - VF_BAR0] = new & self.address_bits(dword - VF_BAR0),
            _ => {}
        }
    }

    fn address_bits(&self, n: usize) -> u32 {
        match self.registers[n] {
            Register::Unused => 0,
            Register::Low { size, .. } => !(self.slice(size) - 1) as u32 & !0xf,
            Register::High { size } => (!(self.slice(size) - 1) >> 32) as u32,
        }
    }

    /// The window of each VF BAR, if it has one.
    fn windows(&self) -> [Option<Window>; 6] {
        if !self.enabled() || self.control & VF_MSE == 0 {
            return [None; 6];
        }
        [0, 1, 2, 3, 4, 5].map(|n| {
            let Register::Low { size, is_64, type_bits } = self.registers[n] else { return None };
            let high = if is_64 { u128::from(self.bars[n + 1]) } else { 0 };
            let base = high << 32 | u128::from(self.bars[n]);
            let len = u128::from(self.slice(size)) * u128::from(self.visible());
            let end = if is_64 { u128::from(u64::MAX) } else { 1 << 32 };
            let (base, len) = (len > 0 && base + len <= end).then_some((base as u64, len as u64))?;
            let memory64 = MemoryKind::Memory64 { prefetchable: type_bits & 8 != 0 };
            let kind = if is_64 { memory64 } else { MemoryKind::Memory32 };
            Some(Window { id: WindowId::VfBar(BarIndex::ALL[n]), base, len, kind })
        })
    }

    fn state(&self) -> SriovState {
        let mut bars = [0; 6];
        (0..6).for_each(|n| bars[n] = self.read(VF_BAR0 + n));
        SriovState {
            control: self.control as u16,
            num_vfs: self.num_vfs as u16,
            system_page_size: self.page_size,
            bars,
        }
    }

    /// Performs the writes by which software would reach `state`, as far as possible.
    fn follow(&mut self, state: &SriovState) {
        self.reset();
        self.write(PAGE_SIZE, state.system_page_size, 0xf);
        for (n, bar) in state.bars.into_iter().enumerate() {
            self.write(VF_BAR0 + n, bar, 0xf);
        }
        self.write(NUM_VFS, state.num_vfs.into(), 0xf);
        self.write(CONTROL, state.control.into(), 0xf);
    }

    fn rid(&self, index: u16) -> Rid {
        let distance = u32::from(self.shape.first_vf_offset) + u32::from(self.shape.vf_stride) * u32::from(index);
        Rid::from_bits((u32::from(PF.to_bits()) + distance) as u16)
    }

    /// True if an existing VF has this routing ID.
    fn has(&self, rid: Rid) -> bool {
        let SriovShape { first_vf_offset, vf_stride, .. } = self.shape;
        let from_pf = (i32::from(rid.to_bits()) - i32::from(PF.to_bits())).rem_euclid(1 << 16);
        let (distance, stride) = (from_pf - i32::from(first_vf_offset), i32::from(vf_stride).max(1));
        distance >= 0 && distance % stride == 0 && distance / stride < i32::from(self.visible())
    }

    /// Compares every register.
    fn compare(&self, sriov: &Sriov) {
        for dword in 0..DWORDS {
            let read = sriov.read(Dword::containing(4 * dword as u16));
            assert_eq!(read, self.read(dword), "dword {dword}, {self:x?}");
        }
    }

    /// Compares the VFs, routing IDs, windows and slices.
    fn compare_vfs(&self, sriov: &Sriov) {
        let (visible, total) = (self.visible(), self.shape.total_vfs);
        assert_eq!((sriov.num_visible(), sriov.vf_enable()), (visible, self.enabled()));
        for index in [0, 1, visible.wrapping_sub(1), visible, total - 1, total, u16::MAX] {
            let index = VfIndex(index);
            let rid = (index.0 < total).then(|| self.rid(index.0));
            assert_eq!(sriov.vf_rid(PF, index), rid);
            if let Some(rid) = rid {
                assert_eq!(sriov.vf_index(PF, rid), (index.0 < visible).then_some(index), "{self:x?}");
            }
        }
        let mut windows = Vec::new();
        sriov.windows(&mut windows);
        assert!(windows.iter().copied().eq(self.windows().into_iter().flatten()), "{windows:x?}, {self:x?}");
        for (n, register) in self.registers.iter().enumerate() {
            let bar = BarIndex::new(n as u8).unwrap();
            let Register::Low { size, .. } = *register else {
                assert_eq!((sriov.aperture(bar), sriov.locate(bar, 0)), (0, None));
                continue;
            };
            let slice = self.slice(size);
            assert_eq!(sriov.aperture(bar), slice);
            for (index, offset) in [(0, 0), (1, slice - 1), (visible.wrapping_sub(1), 1), (visible, 0), (total, 5)] {
                let Some(at) = slice.checked_mul(index.into()).and_then(|at| at.checked_add(offset)) else { continue };
                assert_eq!(sriov.locate(bar, at), (index < visible).then_some((VfIndex(index), offset)), "{self:x?}");
            }
        }
    }
}

/// A typical shape, or one from arbitrary bytes.
fn shape(input: &mut Input<'_>) -> SriovShape {
    let bar = |n, kind| (BarIndex::new(n).unwrap(), kind);
    let choice = input.u8();
    let mut shape = SriovShape {
        total_vfs: [1, 2, 7, 8, 64, 255, 256, 300][usize::from(choice % 8)],
        first_vf_offset: 0xe8,
        vf_stride: 1,
        vf_device_id: 0x1041,
        bars: vec![
            bar(0, BarKind::Memory32 { size: 0x400 }),
            bar(2, BarKind::Memory64 { size: 0x2000, prefetchable: true }),
            bar(4, BarKind::Memory64 { size: 0x1000, prefetchable: true }),
        ],
        function_dependency_link: choice & 7,
    };
    if choice >= 0x80 {
        (shape.total_vfs, shape.first_vf_offset, shape.vf_stride) = (input.u16(), input.u16(), input.u16());
        let kind = |(n, byte): (u8, u8)| {
            let size = 1u64 << (byte & 63);
            Some(match byte >> 6 {
                0 => return None,
                1 => bar(n, BarKind::Memory32 { size: size as u32 }),
                kind => bar(n, BarKind::Memory64 { size, prefetchable: kind == 3 }),
            })
        };
        shape.bars = (0..).zip(input.array::<6>()).filter_map(kind).collect();
    }
    shape
}

/// The capability and the rules, side by side.
struct Pair {
    sriov: Sriov,
    rules: Rules,
}

impl Pair {
    fn apply(&mut self, input: &mut Input<'_>) {
        let registers = self.rules.registers();
        self.apply_one(input);
        self.rules.compare(&self.sriov);
        if self.rules.registers() != registers {
            self.rules.compare_vfs(&self.sriov);
        }
    }

    fn apply_one(&mut self, input: &mut Input<'_>) {
        let Self { sriov, rules } = self;
        match input.u8() % KINDS {
            WRITE => {
                let [dword, enables] = input.array();
                self.write(usize::from(dword) % DWORDS, input.u32(), enables);
            }
            RESET => {
                let effects = sriov.reset(ResetKind::Conventional);
                let disabled = rules.enabled().then(|| VfChange::Disabled { num_vfs: rules.visible() });
                assert_eq!(effects.vfs, disabled);
                rules.reset();
            }
            RESTORE => {
                let (control, num_vfs, page) = (input.u8().into(), input.u16(), input.u8());
                let mut bars = [0; 6];
                bars.iter_mut().for_each(|bar| *bar = input.u16().into());
                let bars = bars.map(|bar: u32| bar << 16 | bar & 0xf);
                let state = SriovState { control, num_vfs, system_page_size: 1u32.wrapping_shl(page.into()), bars };
                let before = sriov.clone();
                let mut wanted = rules.clone();
                wanted.follow(&state);
                match sriov.restore(&state) {
                    Ok(()) => *rules = wanted.clone(),
                    Err(_) => assert_eq!(*sriov, before, "a refused state changes nothing"),
                }
                assert_eq!(wanted.state() == state, sriov.save() == state, "{state:x?}");
            }
            SAVE => {
                let state = sriov.save();
                assert_eq!(state, rules.state());
                let before = sriov.clone();
                assert_eq!(sriov.restore(&state), Ok(()));
                assert_eq!(*sriov, before);
            }
            LOOK_UP => {
                let rid = Rid::from_bits(input.u16());
                match sriov.vf_index(PF, rid) {
                    Some(index) => assert!(index.0 < rules.visible() && rules.rid(index.0) == rid, "{rid}, {rules:x?}"),
                    None => assert!(!rules.has(rid), "{rid}, {rules:x?}"),
                }
            }
            _ => {}
        }
    }

    fn write(&mut self, dword: usize, value: u32, enables: u8) {
        let Self { sriov, rules } = self;
        let (visible, was_enabled, windows) = (rules.visible(), rules.enabled(), rules.windows());
        let effects = sriov.write(Dword::containing(4 * dword as u16), DwordWrite::new(value, enables));
        rules.write(dword, value, enables);
        let expected = match (was_enabled, rules.enabled()) {
            (false, true) => Some(VfChange::Enabled { num_vfs: rules.visible() }),
            (true, false) => Some(VfChange::Disabled { num_vfs: visible }),
            _ => None,
        };
        assert_eq!(effects.vfs, expected, "dword {dword} = {value:#x}/{enables:#x}, {rules:x?}");
        assert!(effects.windows || windows == rules.windows(), "windows change without an effect, {rules:x?}");
        assert!(expected.is_none() || (effects.queues && effects.messages));
        // A refused write leaves its register unchanged.
        match effects.refused {
            Some(Refused::VfEnable { num_vfs, total_vfs }) => assert!(num_vfs > total_vfs && !rules.enabled()),
            Some(Refused::NumVfs { written }) => assert!(was_enabled && u32::from(written) != rules.num_vfs),
            Some(Refused::SystemPageSizeLocked { written }) => assert!(was_enabled && written != rules.page_size),
            Some(Refused::SystemPageSize { written }) => assert!(!was_enabled && written != rules.page_size),
            refused => assert_eq!(refused, None),
        }
    }
}

/// Runs the operations of `input`.
pub fn run(input: &[u8]) {
    run_to_end(input);
}

/// As [`run`]. Returns the rules at the end, or `None` if the shape was invalid.
fn run_to_end(input: &[u8]) -> Option<Rules> {
    let mut input = Input::new(input);
    let shape = shape(&mut input);
    let (sriov, rules) = (Sriov::new(shape.clone(), &PortType::RcIntegratedEndpoint), Rules::new(shape));
    assert_eq!(sriov.is_ok(), rules.is_some(), "{rules:x?}");
    let mut pair = Pair { sriov: sriov.ok()?, rules: rules? };
    pair.rules.compare(&pair.sriov);
    pair.rules.compare_vfs(&pair.sriov);
    while !input.is_empty() {
        pair.apply(&mut input);
    }
    Some(pair.rules)
}

fn write(seed: Seed, dword: usize, value: u32, enables: u8) -> Seed {
    seed.with([WRITE, dword as u8, enables]).with(value.to_le_bytes())
}

/// Operations of Linux when it probes the capability: System Page Size, and the VF BARs' sizes.
fn probe(seed: Seed) -> Seed {
    let seed = write(seed, PAGE_SIZE, 1, 0xf);
    (0..6).fold(seed, |seed, n| write(write(seed, VF_BAR0 + n, u32::MAX, 0xf), VF_BAR0 + n, (n as u32) << 20, 0xf))
}

/// `echo num_vfs > sriov_numvfs`.
fn enable(seed: Seed, num_vfs: u16) -> Seed {
    write(write(seed, NUM_VFS, num_vfs.into(), 0b0011), CONTROL, VF_ENABLE | VF_MSE, 0b0011)
}

/// Seeds: the operations of Linux, a shape with many VFs, one with BARs above 4 GiB, and a state to restore.
pub fn seeds() -> Vec<Vec<u8>> {
    let linux = |choice: u8, num_vfs| enable(probe(Seed::new().with([choice])), num_vfs);
    let cycle = write(linux(3, 7), CONTROL, 0, 0b0011);
    let locked = write(write(linux(2, 4), NUM_VFS, 6, 0b0011), PAGE_SIZE, 2, 0xf);
    let page = write(Seed::new().with([3]), PAGE_SIZE, 0x10, 0xf);
    let raw = Seed::new().with([0x80, 0x00, 0x10, 0x01, 0x00, 0x02, 0x00]).with([0x54, 0, 0xe2, 0, 0xcd, 0]);
    let restore = Seed::new()
        .with([3, RESTORE, 9])
        .with(5u16.to_le_bytes())
        .with([0])
        .with([0, 0, 0, 0, 0xc, 1, 0, 0, 0xc, 2, 0, 0]);
    let last_vf = 0x18u16 + 0xe8 + 6;
    vec![
        linux(3, 7).with([SAVE]).done(),
        enable(cycle, 8).with([RESET]).done(),
        locked.with([LOOK_UP]).with(last_vf.to_le_bytes()).done(),
        linux(7, 300).with([SAVE, RESET]).done(),
        linux(3, 9).done(),
        enable(probe(page), 3).done(),
        enable(probe(raw), 0x1000).done(),
        restore.done(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequences_of_linux_enable_what_they_ask_for() {
        let visible: Vec<_> = seeds().iter().map(|seed| run_to_end(seed).map_or(0, |rules| rules.visible())).collect();
        assert_eq!(visible, [7, 0, 4, 0, 0, 3, 0x1000, 5]);
    }

    #[test]
    fn seeds_decode_windows_and_large_bars() {
        let windows = |n: usize| run_to_end(&seeds()[n]).unwrap().windows().into_iter().flatten();
        assert_eq!(windows(0).count(), 3);
        assert_eq!(windows(6).map(|window| window.len).max(), Some(0x1000 << 34));
    }
}
