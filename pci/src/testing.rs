//! A guest's operations on a device, and the invariants after each of them.
//!
//! The same type of operation serves unit tests, property tests and fuzz targets. Operations are decoded from bytes,
//! and every sequence of bytes is valid: a fuzzer's finding can be pasted as a unit test.

mod model;

pub use model::Model;

use crate::spec::{ALL_ONES, bar, command, header, power, sriov};
use crate::{Access, BarIndex, Device, Dword, Outcome, ResetKind, Rid, Window, WindowId};

/// The target function of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// The PF.
    Pf,
    /// A VF by index, existing or not.
    Vf(u16),
}

/// Operation of a guest, or of its machine, on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Reads configuration space; any offset and length.
    ConfigRead {
        /// The function.
        target: Target,
        /// The first byte.
        offset: u16,
        /// Length in bytes.
        len: u8,
    },
    /// Writes configuration space; any offset and length.
    ConfigWrite {
        /// The function.
        target: Target,
        /// The first byte.
        offset: u16,
        /// Length in bytes, taken from `value`.
        len: u8,
        /// The data, little-endian.
        value: u32,
    },
    /// Reads from a window that may or may not be decoded.
    MmioRead {
        /// The window.
        window: WindowId,
        /// The first byte.
        offset: u64,
        /// Length in bytes, up to 16.
        len: u8,
    },
    /// Writes to a window that may or may not be decoded.
    MmioWrite {
        /// The window.
        window: WindowId,
        /// The first byte.
        offset: u64,
        /// Length in bytes, up to 16; `value` is repeated.
        len: u8,
        /// The data, little-endian.
        value: u32,
    },
    /// A conventional reset of the device.
    Reset,
}

/// Bytes that one operation is decoded from.
pub const OP_LEN: usize = 12;

impl Op {
    /// Decodes `bytes`; ignores a rest of less than [`OP_LEN`] bytes.
    pub fn decode(bytes: &[u8]) -> impl Iterator<Item = Self> {
        bytes.chunks_exact(OP_LEN).filter_map(|chunk| chunk.try_into().ok().map(Self::decode_one))
    }

    /// Encodes the operation for [`Self::decode`]. Lengths of up to 5 bytes of configuration space, and up to 16 of a
    /// window, survive decoding.
    pub fn encode(self) -> [u8; OP_LEN] {
        let target = |target| match target {
            Target::Pf => (0, 0),
            Target::Vf(index) => (0x10, index),
        };
        let window = |window| match window {
            WindowId::Bar(bar) => (0, u16::from(bar.get())),
            WindowId::VfBar(bar) => (0x10, u16::from(bar.get())),
        };
        let low = |offset: u64| u32::try_from(offset & u64::from(u32::MAX)).unwrap_or(0);
        // 0x20: the offset is relative to all of configuration space.
        let (kind, (flag, function), offset, len, value) = match self {
            Self::ConfigWrite { target: of, offset, len, value } => (0x20, target(of), offset.into(), len, value),
            Self::ConfigRead { target: of, offset, len } => (0x27, target(of), offset.into(), len, 0),
            Self::MmioWrite { window: of, offset, len, value } => (0x9, window(of), low(offset), len, value),
            Self::MmioRead { window: of, offset, len } => (0xc, window(of), low(offset), len, 0),
            Self::Reset => (0xf, (0, 0), 0, 0, 0),
        };
        let ([f, g], [o, p, q, r], [a, b, c, d]) = (function.to_le_bytes(), offset.to_le_bytes(), value.to_le_bytes());
        [kind | flag, len, f, g, o, p, q, r, a, b, c, d]
    }

    fn decode_one([kind, len, vf_low, vf_high, offset @ .., a, b, c, d]: [u8; OP_LEN]) -> Self {
        let value = u32::from_le_bytes([a, b, c, d]);
        let vf = u16::from_le_bytes([vf_low, vf_high]);
        let target = if kind & 0x10 == 0 { Target::Pf } else { Target::Vf(vf) };
        let [offset_low, offset_high, ..] = offset;
        let config_offset = u16::from_le_bytes([offset_low, offset_high]);
        let (offset, len) = (u64::from(u32::from_le_bytes(offset)), len % 17);
        let Ok(bar) = BarIndex::new(vf_low % 6) else { return Self::Reset };
        let window = if kind & 0x10 == 0 { WindowId::Bar(bar) } else { WindowId::VfBar(bar) };
        // Most rules concern the registers of the SR-IOV capability: half of all configuration accesses go there.
        let config_offset = if kind & 0x20 == 0 { 0x100 + config_offset % 0x48 } else { config_offset };
        match kind & 0xf {
            0..=6 => Self::ConfigWrite { target, offset: config_offset, len: len % 6, value },
            7..=8 => Self::ConfigRead { target, offset: config_offset, len: len % 6 },
            9..=11 => Self::MmioWrite { window, offset, len, value },
            12..=14 => Self::MmioRead { window, offset, len },
            _ => Self::Reset,
        }
    }
}

/// A device under test, the routing ID of its PF, and the registers that must never change.
pub struct Observed<D> {
    /// The device.
    pub device: D,
    pf: Rid,
    fixed: Vec<u32>,
    /// True if the PF has ARI, so that First VF Offset and VF Stride may depend on ARI Capable Hierarchy.
    has_ari: bool,
}

/// Registers of the SR-IOV capability that are read-only.
const FIXED: [u16; 6] = [
    sriov::HEADER,
    sriov::CAPABILITIES,
    sriov::INITIAL_TOTAL_VFS,
    sriov::OFFSET_STRIDE,
    sriov::VF_DEVICE_ID,
    sriov::SUPPORTED_PAGE_SIZES,
];

/// Offset of a PF's SR-IOV capability.
const SRIOV: u16 = header::FIRST_EXTENDED_CAPABILITY;

/// Bytes that an operation touches at most.
const MAX_LEN: usize = 16;

impl<D: Device> Observed<D> {
    /// Observes `device`, whose PF is `pf`.
    pub fn new(device: D, pf: Rid) -> Self {
        let mut this = Self { device, pf, fixed: Vec::new(), has_ari: false };
        this.has_ari = this.sriov(sriov::CAPABILITIES) & sriov::ARI_CAPABLE_HIERARCHY_PRESERVED != 0;
        this.fixed = this.read_fixed();
        this
    }

    fn read_fixed(&self) -> Vec<u32> {
        let fixed = FIXED.iter().filter(|offset| !(self.has_ari && **offset == sriov::OFFSET_STRIDE));
        fixed.map(|offset| self.sriov(*offset)).collect()
    }

    fn sriov(&self, offset: u16) -> u32 {
        self.device.config_read(self.pf, Dword::containing(SRIOV + offset))
    }

    fn halves(&self, offset: u16) -> (u16, u16) {
        let [a, b, c, d] = self.sriov(offset).to_le_bytes();
        (u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d]))
    }

    /// The routing ID of VF `index`, as software computes it.
    pub fn vf(&self, index: u16) -> Rid {
        let (offset, stride) = self.halves(sriov::OFFSET_STRIDE);
        self.pf.wrapping_add(offset).wrapping_add(stride.wrapping_mul(index))
    }

    /// The routing ID of a function.
    pub fn rid(&self, target: Target) -> Rid {
        match target {
            Target::Pf => self.pf,
            Target::Vf(index) => self.vf(index),
        }
    }

    /// Reads configuration space in any width.
    pub fn config_read(&self, target: Target, offset: u16, data: &mut [u8]) {
        data.fill(0xff);
        if let Some(access) = Access::decode(u64::from(offset), data.len()) {
            access.extract(self.device.config_read(self.rid(target), access.dword()), data);
        }
    }

    /// Writes configuration space in any width.
    pub fn config_write(&mut self, target: Target, offset: u16, data: &[u8]) -> Outcome<D::Stopping> {
        match Access::decode(u64::from(offset), data.len()) {
            Some(access) => self.device.config_write(self.rid(target), access.dword(), access.write(data)),
            None => Outcome::none(),
        }
    }

    /// Enables `num_vfs` VFs and their memory, as Linux does.
    pub fn enable_vfs(&mut self, num_vfs: u16) -> Outcome<D::Stopping> {
        let _ = self.config_write(Target::Pf, SRIOV + sriov::NUM_VFS_FDL, &num_vfs.to_le_bytes());
        let control = sriov::VF_ENABLE | sriov::VF_MSE;
        self.config_write(Target::Pf, SRIOV + sriov::CONTROL_STATUS, &control.to_le_bytes())
    }

    /// Disables all VFs, as Linux does.
    pub fn disable_vfs(&mut self) -> Outcome<D::Stopping> {
        self.config_write(Target::Pf, SRIOV + sriov::CONTROL_STATUS, &[0, 0])
    }

    /// Applies `op` to the device.
    pub fn apply(&mut self, op: Op) -> Outcome<D::Stopping> {
        let mut data = [0; MAX_LEN];
        match op {
            Op::ConfigRead { target, offset, len } => {
                self.config_read(target, offset, head(&mut data, len));
                Outcome::none()
            }
            Op::ConfigWrite { target, offset, len, value } => {
                fill(&mut data, value);
                self.config_write(target, offset, head(&mut data, len))
            }
            Op::MmioRead { window, offset, len } => {
                self.device.mmio_read(window, offset, head(&mut data, len));
                Outcome::none()
            }
            Op::MmioWrite { window, offset, len, value } => {
                fill(&mut data, value);
                self.device.mmio_write(window, offset, head(&mut data, len))
            }
            Op::Reset => self.device.reset(ResetKind::Conventional),
        }
    }

    /// Checks the invariants; the error describes the violated one.
    ///
    /// # Errors
    ///
    /// Fails if an invariant is broken.
    pub fn check(&self) -> Result<(), String> {
        let claim = |holds: bool, what: &str| if holds { Ok(()) } else { Err(what.to_string()) };
        claim(self.read_fixed() == self.fixed, "a read-only register of SR-IOV changed")?;
        let ((control, status), (num_vfs, _)) = (self.halves(sriov::CONTROL_STATUS), self.halves(sriov::NUM_VFS_FDL));
        let (_, total_vfs) = self.halves(sriov::INITIAL_TOTAL_VFS);
        let ari = if self.has_ari { sriov::ARI_CAPABLE_HIERARCHY } else { 0 };
        claim(
            control & !(sriov::VF_ENABLE | sriov::VF_MSE | ari) == 0 && status == 0,
            "a reserved bit of SR-IOV is set",
        )?;
        let vf_enable = control & sriov::VF_ENABLE != 0;
        claim(!vf_enable || num_vfs <= total_vfs, "VF Enable is set with NumVFs above TotalVFs")?;
        let page_size = self.sriov(sriov::SYSTEM_PAGE_SIZE);
        claim(
            page_size.is_power_of_two() && page_size & sriov::PAGE_SIZES != 0,
            "System Page Size is not one supported size",
        )?;
        let visible = if vf_enable { num_vfs } else { 0 };
        self.check_vfs(visible, total_vfs)?;
        let decodes = control & sriov::VF_MSE != 0 && self.is_d0();
        self.check_windows(if decodes { visible } else { 0 }, u64::from(page_size) << 12)
    }

    /// Checks that exactly the visible VFs respond. Checks all of up to 32, and only those at the edges of more.
    fn check_vfs(&self, visible: u16, total_vfs: u16) -> Result<(), String> {
        let edges = [0, visible.saturating_sub(1), visible, total_vfs - 1];
        for index in (0..total_vfs.min(32)).chain(edges).filter(|index| *index < total_vfs) {
            let rid = self.vf(index);
            let class = self.device.config_read(rid, Dword::containing(header::CLASS_REVISION));
            if (class != ALL_ONES) != (index < visible) {
                return Err(format!("VF {index} of {visible} answers {class:#x}"));
            }
            let command = self.device.config_read(rid, Dword::containing(header::COMMAND_STATUS)) & 0xffff;
            if index < visible && command & !u32::from(command::BUS_MASTER) != 0 {
                return Err(format!("the Command register of VF {index} is {command:#x}"));
            }
        }
        Ok(())
    }

    fn check_windows(&self, decoding: u16, page_size: u64) -> Result<(), String> {
        let mut windows = Vec::new();
        self.device.windows(&mut windows);
        let mut upper_half = false;
        for index in BarIndex::ALL {
            let window = windows.iter().find(|window| window.id == WindowId::VfBar(index));
            if upper_half {
                upper_half = false;
                if window.is_some() {
                    return Err(format!("VF BAR {index} is an upper half and decodes {window:x?}"));
                }
                continue;
            }
            self.check_window(index, window, decoding, page_size)?;
            upper_half = self.sriov(sriov::VF_BAR0 + u16::from(index.get()) * 4) & bar::MEMORY64 != 0;
        }
        Ok(())
    }

    fn check_window(
        &self,
        index: BarIndex,
        window: Option<&Window>,
        decoding: u16,
        page_size: u64,
    ) -> Result<(), String> {
        let offset = sriov::VF_BAR0 + u16::from(index.get()) * 4;
        let low = self.sriov(offset);
        let base = if low & bar::MEMORY64 == 0 {
            u64::from(low & !0xf)
        } else {
            u64::from(self.sriov(offset + 4)) << 32 | u64::from(low & !0xf)
        };
        match window {
            Some(window) => {
                let aperture = window.len.checked_div(u64::from(decoding)).unwrap_or(0);
                let sound = window.base == base
                    && aperture * u64::from(decoding) == window.len
                    && aperture.is_power_of_two()
                    && aperture >= page_size
                    && base % aperture == 0
                    && base.checked_add(window.len).is_some();
                if sound { Ok(()) } else { Err(format!("VF BAR {index} decodes {window:x?} with {decoding} VFs")) }
            }
            // Too close to the end of the address space, or not a BAR.
            None if decoding == 0 || base > u64::MAX >> 1 || low & bar::MEMORY64 == 0 => Ok(()),
            None => Err(format!("VF BAR {index} decodes nothing with {decoding} VFs at {base:#x}")),
        }
    }

    /// True if the PF is in D0 according to its power management capability.
    fn is_d0(&self) -> bool {
        let read = |offset| self.device.config_read(self.pf, Dword::containing(offset));
        let mut offset = u16::from(read(header::CAPABILITIES).to_le_bytes()[0]);
        while offset >= header::FIRST_CAPABILITY {
            let [id, next, ..] = read(offset).to_le_bytes();
            if id == crate::spec::capability_id::POWER_MANAGEMENT {
                return read(offset + power::CONTROL_STATUS) & power::STATE == power::D0;
            }
            offset = u16::from(next);
        }
        true
    }
}

fn head(data: &mut [u8; MAX_LEN], len: u8) -> &mut [u8] {
    let len = usize::from(len).min(MAX_LEN);
    data.get_mut(..len).unwrap_or_default()
}

fn fill(data: &mut [u8; MAX_LEN], value: u32) {
    for chunk in data.chunks_exact_mut(4) {
        chunk.copy_from_slice(&value.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_read_back_from_their_bytes() {
        let bar = BarIndex::ALL[4];
        let value = 0x4433_2211;
        let ops = [
            Op::ConfigRead { target: Target::Vf(0x1ff), offset: 0xabc, len: 4 },
            Op::ConfigWrite { target: Target::Pf, offset: 0x110, len: 2, value },
            Op::ConfigWrite { target: Target::Vf(3), offset: 0xffff, len: 5, value },
            Op::MmioRead { window: WindowId::Bar(bar), offset: 0xffff_ffff, len: 16 },
            Op::MmioWrite { window: WindowId::VfBar(bar), offset: 0x800, len: 8, value },
            Op::Reset,
        ];
        let bytes = ops.map(Op::encode).concat();
        assert_eq!(Op::decode(&bytes).collect::<Vec<_>>(), ops);
    }
}
