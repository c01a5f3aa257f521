//! A second implementation of SR-IOV, as obvious as possible: bytes, masks, and each rule spelled out.
//!
//! The model shares no code with the device. It takes the power-on image of each function from the device, and has its
//! own list of writable bits. From these it predicts the value of every register after any sequence of operations, the
//! existing functions, and their decoded windows. It favours clarity over speed.

use std::collections::BTreeMap;

use super::{Op, Target};
use crate::{Device, Dword, MemoryKind, ResetKind, Rid, Window, WindowId};

/// Bytes of a function's configuration space that are compared: header, capabilities and extended capabilities.
const LEN: usize = 0x150;

// Offsets of registers in the functions under test.
const COMMAND: usize = 0x04;
const CACHE_LINE_SIZE: usize = 0x0c;
const BAR0: usize = 0x10;
const SRIOV: usize = 0x100;
const CONTROL: usize = SRIOV + 0x08;
const TOTAL_VFS: usize = SRIOV + 0x0e;
const NUM_VFS: usize = SRIOV + 0x10;
const OFFSET_STRIDE: usize = SRIOV + 0x14;
const PAGE_SIZE: usize = SRIOV + 0x20;
const VF_BAR0: usize = SRIOV + 0x24;

const SUPPORTED_PAGE_SIZES: u32 = 0x553;
/// ARI Capable Hierarchy, in Control.
const ARI: u16 = 1 << 4;

/// A BAR in the model: its first register, its size for one function, and its type bits.
#[derive(Debug, Clone, Copy)]
struct Bar {
    register: usize,
    size: u64,
    is_64: bool,
    prefetchable: bool,
}

/// Configuration space of one function: its bytes, and their writable bits.
#[derive(Clone)]
struct Function {
    bytes: [u8; LEN],
    writable: [u8; LEN],
    power_on: [u8; LEN],
    pcie: usize,
    msix: Option<usize>,
    power: Option<usize>,
}

fn get16(bytes: &[u8], offset: usize) -> u16 {
    bytes.get(offset..offset + 2).and_then(|b| b.try_into().ok()).map_or(0, u16::from_le_bytes)
}

fn get32(bytes: &[u8], offset: usize) -> u32 {
    bytes.get(offset..offset + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_le_bytes)
}

fn put(bytes: &mut [u8], offset: usize, value: &[u8]) {
    if let Some(place) = bytes.get_mut(offset..offset + value.len()) {
        place.copy_from_slice(value);
    }
}

impl Function {
    fn new(device: &impl Device, rid: Rid) -> Self {
        let mut bytes = [0; LEN];
        for (dword, place) in Dword::all().zip(bytes.chunks_exact_mut(4)) {
            place.copy_from_slice(&device.config_read(rid, dword).to_le_bytes());
        }
        let find = |id: u8| {
            let mut offset = usize::from(get16(&bytes, 0x34) & 0xff);
            while offset != 0 && get16(&bytes, offset) & 0xff != u16::from(id) {
                offset = usize::from(get16(&bytes, offset) >> 8);
            }
            (offset != 0).then_some(offset)
        };
        let (pcie, msix, power) = (find(0x10).unwrap_or(0), find(0x11), find(0x01));
        Self { bytes, writable: [0; LEN], power_on: bytes, pcie, msix, power }
    }

    /// Marks the writable bits: for a VF only Bus Master Enable and the MSI-X control bits.
    fn allow(&mut self, is_vf: bool) {
        let (is_endpoint, has_ari, pcie) = (self.is_endpoint(), self.has_ari(), self.pcie);
        let link_control_2 = if get32(&self.bytes, pcie + 0x2c) & 0b100 != 0 { 0xff9fu16 } else { 0 };
        let writable = &mut self.writable;
        if let Some(msix) = self.msix {
            put(writable, msix + 2, &0xc000u16.to_le_bytes());
        }
        if is_vf {
            put(writable, COMMAND, &0x0004u16.to_le_bytes());
            return;
        }
        put(writable, COMMAND, &0x0546u16.to_le_bytes());
        put(writable, CACHE_LINE_SIZE, &[0xff]);
        put(writable, pcie + 8, &0x781fu16.to_le_bytes());
        if is_endpoint {
            put(writable, pcie + 0x10, &0x00cbu16.to_le_bytes());
            put(writable, pcie + 0x28, &0x0010u16.to_le_bytes());
            put(writable, pcie + 0x30, &link_control_2.to_le_bytes());
        }
        put(writable, CONTROL, &if has_ari { 0x0009 | ARI } else { 0x0009 }.to_le_bytes());
        put(writable, NUM_VFS, &0xffffu16.to_le_bytes());
        put(writable, PAGE_SIZE, &0xffff_ffffu32.to_le_bytes());
        if let Some(power) = self.power {
            put(writable, power + 4, &[0b11]);
        }
    }

    /// The model does not cover virtio capabilities.
    fn is_modelled(&self, offset: usize) -> bool {
        let ends = [Some(self.pcie + 0x3c), self.msix.map(|msix| msix + 12), self.power.map(|power| power + 8)];
        let vendor_start = ends.into_iter().flatten().max().unwrap_or(0);
        !(vendor_start..0x100).contains(&offset)
    }

    /// True for an Endpoint behind a port: Device/Port Type 0.
    fn is_endpoint(&self) -> bool {
        get16(&self.bytes, self.pcie + 2) & 0xf0 == 0
    }

    /// True if the chain of extended capabilities has ARI.
    fn has_ari(&self) -> bool {
        let mut offset = SRIOV;
        while offset != 0 && get16(&self.bytes, offset) != 0x000e {
            offset = usize::from(get16(&self.bytes, offset + 2) >> 4);
        }
        offset != 0
    }
}

/// Expected state of a PF with VFs after the operations so far.
#[derive(Clone)]
pub struct Model {
    pf: Function,
    vf_power_on: Function,
    /// The VFs that were written to since they came into existence. All others are in their power-on state.
    vfs: BTreeMap<u16, Function>,
    bars: Vec<Bar>,
    vf_bars: Vec<Bar>,
    /// First VF Offset and VF Stride while ARI Capable Hierarchy is clear, and while it is set.
    offset_stride: [u32; 2],
}

impl Model {
    /// Creates the model of `device` in its power-on state. Enables its VFs for a moment to read their image, and sizes
    /// its BARs.
    pub fn new(device: &mut impl Device, pf: Rid) -> Self {
        let mut function = Function::new(device, pf);
        let bars = size_bars(device, pf, BAR0);
        let vf_bars = size_bars(device, pf, VF_BAR0);
        set(device, pf, CONTROL, ARI);
        let without_ari = get32(&function.bytes, OFFSET_STRIDE);
        let with_ari = get32(&Function::new(device, pf).bytes, OFFSET_STRIDE);
        set(device, pf, CONTROL, 0);
        set(device, pf, NUM_VFS, 1);
        set(device, pf, CONTROL, 1);
        let first = get16(&function.bytes, OFFSET_STRIDE);
        let mut vf = Function::new(device, pf.wrapping_add(first));
        let _ = device.reset(ResetKind::Conventional);
        function.allow(false);
        vf.allow(true);
        let offset_stride = [without_ari, with_ari];
        let mut this = Self { pf: function, vf_power_on: vf, vfs: BTreeMap::new(), bars, vf_bars, offset_stride };
        this.allow_bars();
        this
    }

    fn vf_enable(&self) -> bool {
        vf_enable(&self.pf.bytes)
    }

    /// Number of VFs that exist.
    pub fn num_visible(&self) -> u16 {
        if self.vf_enable() { get16(&self.pf.bytes, NUM_VFS) } else { 0 }
    }

    /// Size of a VF's slice of a VF BAR, in bytes: the BAR's size, or a system page.
    fn slice(&self, bar: &Bar) -> u64 {
        bar.size.max(u64::from(get32(&self.pf.bytes, PAGE_SIZE)) << 12)
    }

    /// A BAR's address bits begin at its size.
    fn allow_bars(&mut self) {
        let pf = self.bars.iter().map(|bar| (BAR0, *bar, bar.size));
        let vf = self.vf_bars.iter().map(|bar| (VF_BAR0, *bar, self.slice(bar)));
        let all: Vec<_> = pf.chain(vf).collect();
        for (first, bar, size) in all {
            let mask = (!(size - 1) & !0xf).to_le_bytes();
            let len = if bar.is_64 { 8 } else { 4 };
            put(&mut self.pf.writable, first + 4 * bar.register, mask.get(..len).unwrap_or_default());
        }
    }

    fn reset_pf(&mut self, kind: ResetKind) {
        let old = self.pf.bytes;
        self.pf.bytes = self.pf.power_on;
        self.allow_bars();
        self.vfs.clear();
        // A function level reset keeps the registers of the link and of the port above.
        if kind == ResetKind::Flr {
            if self.pf.is_endpoint() {
                for offset in [self.pf.pcie + 0x10, self.pf.pcie + 0x30] {
                    put(&mut self.pf.bytes, offset, &get16(&old, offset).to_le_bytes());
                }
            }
            put(&mut self.pf.bytes, CONTROL, &(get16(&old, CONTROL) & ARI).to_le_bytes());
            self.route();
        }
    }

    /// First VF Offset and VF Stride follow ARI Capable Hierarchy.
    fn route(&mut self) {
        let [without_ari, with_ari] = self.offset_stride;
        let value = if get16(&self.pf.bytes, CONTROL) & ARI == 0 { without_ari } else { with_ari };
        put(&mut self.pf.bytes, OFFSET_STRIDE, &value.to_le_bytes());
    }

    /// Applies `op` to the model, as to a device.
    pub fn apply(&mut self, op: Op) {
        match op {
            Op::ConfigWrite { target, offset, len, value } => {
                let offset = usize::from(offset);
                let len = usize::from(len);
                if matches!(len, 1 | 2 | 4) && offset % len == 0 && offset + len <= LEN {
                    let data = value.to_le_bytes();
                    self.write(target, offset, data.get(..len).unwrap_or_default());
                }
            }
            Op::Reset => self.reset_pf(ResetKind::Conventional),
            Op::ConfigRead { .. } | Op::MmioRead { .. } | Op::MmioWrite { .. } => {}
        }
    }

    fn write(&mut self, target: Target, offset: usize, data: &[u8]) {
        match target {
            Target::Pf => self.write_pf(offset, data),
            Target::Vf(index) if index < self.num_visible() => {
                let vf = self.vfs.entry(index).or_insert_with(|| self.vf_power_on.clone());
                store(vf, offset, data);
                if initiates_flr(vf, offset, data) {
                    self.vfs.remove(&index);
                }
            }
            Target::Vf(_) => {}
        }
    }

    fn write_pf(&mut self, offset: usize, data: &[u8]) {
        let old = &self.pf.bytes.clone();
        let was_enabled = vf_enable(old);
        store(&mut self.pf, offset, data);
        // NumVFs, System Page Size and ARI Capable Hierarchy may only be written while VF Enable is clear.
        if was_enabled {
            let control = get16(&self.pf.bytes, CONTROL) & !ARI | get16(old, CONTROL) & ARI;
            put(&mut self.pf.bytes, CONTROL, &control.to_le_bytes());
            put(&mut self.pf.bytes, NUM_VFS, &get16(old, NUM_VFS).to_le_bytes());
            put(&mut self.pf.bytes, PAGE_SIZE, &get32(old, PAGE_SIZE).to_le_bytes());
        }
        // NumVFs above TotalVFs cannot be enabled.
        if !was_enabled && get16(old, NUM_VFS) > get16(old, TOTAL_VFS) {
            let control = get16(&self.pf.bytes, CONTROL) & !1;
            put(&mut self.pf.bytes, CONTROL, &control.to_le_bytes());
        }
        self.route();
        // System Page Size must be one supported size.
        let page_size = get32(&self.pf.bytes, PAGE_SIZE);
        if page_size.count_ones() != 1 || page_size & SUPPORTED_PAGE_SIZES == 0 {
            put(&mut self.pf.bytes, PAGE_SIZE, &get32(old, PAGE_SIZE).to_le_bytes());
        } else if page_size != get32(old, PAGE_SIZE) {
            // After a change, the VF BARs keep the address bits above the slice size.
            self.allow_bars();
            for n in VF_BAR0..VF_BAR0 + 6 * 4 {
                let power_on = self.pf.power_on.get(n).copied().unwrap_or(0);
                if let (Some(byte), Some(writable)) = (self.pf.bytes.get_mut(n), self.pf.writable.get(n)) {
                    *byte = *byte & writable | power_on;
                }
            }
        }
        // The power states are D0 and D3hot.
        if let Some(power) = self.pf.power.filter(|power| matches!(get16(&self.pf.bytes, power + 4) & 3, 1 | 2)) {
            put(&mut self.pf.bytes, power + 4, &get16(old, power + 4).to_le_bytes());
        }
        if initiates_flr(&self.pf, offset, data) {
            self.reset_pf(ResetKind::Flr);
        } else if was_enabled && !self.vf_enable() {
            self.vfs.clear();
        }
    }

    /// The windows that are decoded.
    pub fn windows(&self) -> Vec<Window> {
        let is_d0 = self.pf.power.is_none_or(|power| get16(&self.pf.bytes, power + 4) & 3 == 0);
        let memory_space = get16(&self.pf.bytes, COMMAND) & 2 != 0;
        let vf_mse = get16(&self.pf.bytes, CONTROL) & 8 != 0;
        let mut windows = Vec::new();
        if is_d0 && memory_space {
            windows.extend(self.bars.iter().filter_map(|bar| self.window(BAR0, bar, bar.size, 1)));
        }
        if is_d0 && vf_mse {
            let count = self.num_visible();
            windows.extend(self.vf_bars.iter().filter_map(|bar| self.window(VF_BAR0, bar, self.slice(bar), count)));
        }
        windows
    }

    fn window(&self, first: usize, bar: &Bar, slice: u64, count: u16) -> Option<Window> {
        let offset = first + 4 * bar.register;
        let low = u64::from(get32(&self.pf.bytes, offset) & !0xf);
        let high = if bar.is_64 { u64::from(get32(&self.pf.bytes, offset + 4)) } else { 0 };
        let base = high << 32 | low;
        let len = slice.checked_mul(count.into()).filter(|len| *len > 0)?;
        let end = base.checked_add(len)?;
        let index = crate::BarIndex::new(u8::try_from(bar.register).ok()?).ok()?;
        let memory64 = MemoryKind::Memory64 { prefetchable: bar.prefetchable };
        let kind = if bar.is_64 { memory64 } else { MemoryKind::Memory32 };
        let id = if first == BAR0 { WindowId::Bar(index) } else { WindowId::VfBar(index) };
        (bar.is_64 || end <= 1 << 32).then_some(Window { id, base, len, kind })
    }

    /// Compares the device with the model: every dword of the PF and of the VFs at the edges of the existing ones, and
    /// the windows.
    ///
    /// # Errors
    ///
    /// The first difference.
    pub fn compare(&self, device: &impl Device, pf: Rid) -> Result<(), String> {
        self.compare_function(Target::Pf, device, pf)?;
        let visible = self.num_visible();
        let total = get16(&self.pf.bytes, TOTAL_VFS);
        for index in (0..total.min(8)).chain([visible.saturating_sub(1), visible, total - 1]) {
            self.compare_function(Target::Vf(index), device, pf)?;
        }
        self.compare_windows(device)
    }

    /// Compares the dword of configuration space that `op` accessed, and the windows: much less than [`Self::compare`],
    /// for use after each of many operations.
    ///
    /// # Errors
    ///
    /// The first difference.
    pub fn compare_after(&self, op: Op, device: &impl Device, pf: Rid) -> Result<(), String> {
        if let Op::ConfigRead { target, offset, .. } | Op::ConfigWrite { target, offset, .. } = op {
            if let Some(function) = self.function(target, pf) {
                function.compare_dword(device, usize::from(offset) & !3)?;
            }
        }
        self.compare_windows(device)
    }

    /// A function, its routing ID and its expected values; `None` for one that can never exist.
    fn function(&self, target: Target, pf: Rid) -> Option<Expected<'_>> {
        let visible = self.num_visible();
        match target {
            Target::Pf => Some(Expected { target, visible, rid: pf, function: Some(&self.pf) }),
            Target::Vf(index) if index < get16(&self.pf.bytes, TOTAL_VFS) => {
                let (offset, stride) = (get16(&self.pf.bytes, SRIOV + 0x14), get16(&self.pf.bytes, SRIOV + 0x16));
                let rid = pf.wrapping_add(offset).wrapping_add(stride.wrapping_mul(index));
                let vf = self.vfs.get(&index).unwrap_or(&self.vf_power_on);
                Some(Expected { target, visible, rid, function: (index < visible).then_some(vf) })
            }
            Target::Vf(_) => None,
        }
    }

    fn compare_function(&self, target: Target, device: &impl Device, pf: Rid) -> Result<(), String> {
        let Some(expected) = self.function(target, pf) else { return Ok(()) };
        (0..LEN).step_by(4).try_for_each(|offset| expected.compare_dword(device, offset))
    }

    fn compare_windows(&self, device: &impl Device) -> Result<(), String> {
        let (mut windows, mut expected) = (Vec::new(), self.windows());
        device.windows(&mut windows);
        windows.sort_by_key(|window| window.id);
        expected.sort_by_key(|window| window.id);
        if windows == expected { Ok(()) } else { Err(format!("decodes {windows:x?}, expected {expected:x?}")) }
    }
}

/// A function, and its expected values if it exists.
struct Expected<'a> {
    target: Target,
    visible: u16,
    rid: Rid,
    function: Option<&'a Function>,
}

impl Expected<'_> {
    fn compare_dword(&self, device: &impl Device, offset: usize) -> Result<(), String> {
        let expected = match self.function {
            Some(function) if offset < LEN && function.is_modelled(offset) => get32(&function.bytes, offset),
            Some(_) => return Ok(()),
            None => u32::MAX,
        };
        let read = device.config_read(self.rid, Dword::containing(u16::try_from(offset).unwrap_or(0)));
        if read == expected {
            return Ok(());
        }
        let Self { target, visible, .. } = self;
        Err(format!("{target:?} of {visible} VFs reads {read:#010x} at {offset:#x}, expected {expected:#010x}"))
    }
}

/// Writes the 16-bit register of the PF at the beginning of a dword.
fn set(device: &mut impl Device, pf: Rid, offset: usize, value: u16) {
    let dword = Dword::containing(u16::try_from(offset).unwrap_or(0));
    let _ = device.config_write(pf, dword, crate::DwordWrite::new(value.into(), 0b0011));
}

fn vf_enable(pf: &[u8]) -> bool {
    get16(pf, CONTROL) & 1 != 0
}

/// Writes the writable bits.
fn store(function: &mut Function, offset: usize, data: &[u8]) {
    for (n, byte) in (offset..).zip(data) {
        if let (Some(place), Some(mask)) = (function.bytes.get_mut(n), function.writable.get(n)) {
            *place = *place & !mask | byte & mask;
        }
    }
}

/// True for a write that sets bit 15 of Device Control.
fn initiates_flr(function: &Function, offset: usize, data: &[u8]) -> bool {
    let byte = function.pcie + 9;
    byte.checked_sub(offset).and_then(|n| data.get(n)).is_some_and(|byte| byte & 0x80 != 0)
}

/// Sizes six BARs as software does.
fn size_bars(device: &mut impl Device, pf: Rid, first: usize) -> Vec<Bar> {
    let dword = |register: usize| Dword::containing(u16::try_from(first + 4 * register).unwrap_or(0));
    let mut sized = Vec::new();
    let mut register = 0;
    while register < 6 {
        let type_bits = device.config_read(pf, dword(register));
        let (is_64, prefetchable) = (type_bits & 0b110 == 0b100, type_bits & 0b1000 != 0);
        let mut mask = 0;
        for n in 0..=usize::from(is_64) {
            let _ = device.config_write(pf, dword(register + n), crate::DwordWrite::full(u32::MAX));
            mask |= u64::from(device.config_read(pf, dword(register + n))) << (32 * n);
        }
        let mask = mask & !0xf;
        if mask != 0 {
            sized.push(Bar { register, size: 1 << mask.trailing_zeros(), is_64, prefetchable });
        }
        register += if is_64 { 2 } else { 1 };
    }
    sized
}
