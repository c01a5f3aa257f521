//! The SR-IOV extended capability of a PF that is a Root Complex Integrated Endpoint (`PCIe 6.2 §9.3.3`).
//!
//! The registers are the only state: which VFs exist, what they decode and where is computed from them each time it is
//! asked, after their masks have been applied, and never remembered.
//!
//! Where the standard leaves behaviour undefined, this is ours:
//! - NumVFs is 0 after reset, holds any value, and is read-only while VF Enable is set; so is System Page Size.
//! - VF Enable cannot be set while NumVFs exceeds TotalVFs. With NumVFs 0 it can, and no VF exists.
//! - A System Page Size that is not exactly one supported size is ignored. A new one leaves the VF BARs the
//!   address bits that they still have: Linux restores the BARs before the page size after a reset.

use crate::bar::{BarError, BarSet};
use crate::spec::{extended_capability_id, sriov};
use crate::{BarIndex, BarKind, Dword, DwordWrite, Effects, Rid, VfChange, VfIndex, VfPlacement, Window, WindowId};

/// What the SR-IOV capability of a PF says of its VFs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SriovShape {
    /// TotalVFs and InitialVFs, at least 1.
    pub total_vfs: u16,
    /// The distance from the PF's routing ID to that of the first VF, at least 1.
    pub first_vf_offset: u16,
    /// The distance between the routing IDs of two VFs, at least 1 with more than one VF.
    pub vf_stride: u16,
    /// The Device ID that the VFs have for software.
    pub vf_device_id: u16,
    /// The VF BARs, each with the size that one VF decodes.
    pub bars: Vec<(BarIndex, BarKind)>,
    /// The PF's own function number, if it depends on no other PF.
    pub function_dependency_link: u8,
}

/// Why an SR-IOV capability cannot be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SriovError {
    /// TotalVFs is 0.
    #[error("an SR-IOV capability needs at least one VF")]
    NoVfs,
    /// First VF Offset is 0, or VF Stride is with more than one VF, so that two functions would share a routing ID.
    #[error("First VF Offset {first_vf_offset} and VF Stride {vf_stride} give two functions one routing ID")]
    Overlap {
        /// First VF Offset.
        first_vf_offset: u16,
        /// VF Stride.
        vf_stride: u16,
    },
    /// The last VF's routing ID is 2^16 or more away from the PF's.
    #[error("{total_vfs} VFs do not fit the routing IDs of a segment")]
    RoutingIds {
        /// TotalVFs.
        total_vfs: u16,
    },
    /// The VF BARs cannot be.
    #[error("VF {0}")]
    Bar(#[from] BarError),
}

/// The registers of the capability.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sriov {
    shape: SriovShape,
    control: u16,
    num_vfs: u16,
    /// The System Page Size register: one bit, bit n for 2^(n+12) bytes.
    system_page_size: u32,
    bars: BarSet,
}

impl Sriov {
    /// No VF enabled.
    ///
    /// # Errors
    ///
    /// When the VFs described cannot be.
    pub fn new(shape: SriovShape) -> Result<Self, SriovError> {
        let SriovShape { total_vfs, first_vf_offset, vf_stride, .. } = shape;
        if total_vfs == 0 {
            return Err(SriovError::NoVfs);
        }
        if first_vf_offset == 0 || vf_stride == 0 && total_vfs > 1 {
            return Err(SriovError::Overlap { first_vf_offset, vf_stride });
        }
        let last = u32::from(first_vf_offset) + u32::from(vf_stride) * u32::from(total_vfs - 1);
        if last > u32::from(u16::MAX) {
            return Err(SriovError::RoutingIds { total_vfs });
        }
        let bars = BarSet::new(&shape.bars)?;
        let mut this = Self { shape, control: 0, num_vfs: 0, system_page_size: 0, bars };
        this.set_system_page_size(1);
        Ok(this)
    }

    /// What the capability says of the VFs.
    pub fn shape(&self) -> &SriovShape {
        &self.shape
    }

    /// TotalVFs: how many VFs are reserved.
    pub fn total_vfs(&self) -> u16 {
        self.shape.total_vfs
    }

    /// NumVFs, as it reads: 0 to 65535.
    pub fn num_vfs(&self) -> u16 {
        self.num_vfs
    }

    /// VF Enable.
    pub fn vf_enable(&self) -> bool {
        self.control & sriov::VF_ENABLE != 0
    }

    /// VF MSE.
    pub fn vf_mse(&self) -> bool {
        self.control & sriov::VF_MSE != 0
    }

    /// How many VFs exist now: NumVFs if VF Enable is set, else 0. Never above TotalVFs.
    pub fn num_visible(&self) -> u16 {
        if self.vf_enable() { self.num_vfs.min(self.shape.total_vfs) } else { 0 }
    }

    /// The routing ID of VF `index` of the PF `pf`, whether it exists now or not; `None` for an index of TotalVFs and more.
    pub fn vf_rid(&self, pf: Rid, index: VfIndex) -> Option<Rid> {
        let SriovShape { total_vfs, first_vf_offset, vf_stride, .. } = self.shape;
        let vfs = VfPlacement { total_vfs, first_vf_offset, vf_stride };
        (index.0 < total_vfs).then(|| vfs.vf_rid(pf, index))
    }

    /// The VF of the PF `pf` that has the routing ID `rid` and exists now.
    pub fn vf_index(&self, pf: Rid, rid: Rid) -> Option<VfIndex> {
        let SriovShape { first_vf_offset, vf_stride, .. } = self.shape;
        let distance = rid.to_bits().wrapping_sub(pf.to_bits()).checked_sub(first_vf_offset)?;
        // With a single VF the stride may be 0.
        let index = if distance == 0 { 0 } else { distance.checked_div(vf_stride)? };
        (distance == index.wrapping_mul(vf_stride) && index < self.num_visible()).then_some(VfIndex(index))
    }

    /// The bytes that one VF decodes of VF BAR `bar`: its size, or the System Page Size where that is larger. 0 where there
    /// is no such VF BAR.
    pub fn aperture(&self, bar: BarIndex) -> u64 {
        self.bars.aperture(bar).unwrap_or(0)
    }

    /// The VF, and the offset in its VF BAR `bar`, that byte `offset` of the window of that BAR belongs to; `None` beyond the
    /// last VF that exists.
    pub fn locate(&self, bar: BarIndex, offset: u64) -> Option<(VfIndex, u64)> {
        let aperture = self.bars.aperture(bar)?;
        let index = u16::try_from(offset.checked_div(aperture)?).ok()?;
        (index < self.num_visible()).then_some((VfIndex(index), offset % aperture))
    }

    /// Appends a window for each VF BAR, with the slices of all VFs that exist, if VF Enable and VF MSE are set. A BAR whose
    /// slices would pass the end of its address space is not decoded.
    pub fn windows(&self, out: &mut Vec<Window>) {
        if self.vf_mse() {
            self.bars.windows(self.num_visible(), WindowId::VfBar, out);
        }
    }

    /// Reads the dword at `reg` from the start of the capability. The next pointer is 0.
    pub fn read(&self, reg: Dword) -> u32 {
        let pair = |low: u16, high: u16| u32::from(low) | u32::from(high) << 16;
        match reg.offset() {
            sriov::HEADER => pair(extended_capability_id::SRIOV, 1),
            sriov::CONTROL_STATUS => pair(self.control, 0),
            sriov::INITIAL_TOTAL_VFS => pair(self.shape.total_vfs, self.shape.total_vfs),
            sriov::NUM_VFS_FDL => pair(self.num_vfs, u16::from(self.shape.function_dependency_link)),
            sriov::OFFSET_STRIDE => pair(self.shape.first_vf_offset, self.shape.vf_stride),
            sriov::VF_DEVICE_ID => pair(0, self.shape.vf_device_id),
            sriov::SUPPORTED_PAGE_SIZES => sriov::PAGE_SIZES,
            sriov::SYSTEM_PAGE_SIZE => self.system_page_size,
            offset @ sriov::VF_BAR0..=sriov::VF_BAR5 => self.bars.read((offset - sriov::VF_BAR0) / 4),
            // No VF migration, and for a Root Complex Integrated Endpoint no ARI Capable Hierarchy.
            _ => 0,
        }
    }

    /// Writes the dword at `reg` from the start of the capability.
    pub fn write(&mut self, reg: Dword, write: DwordWrite) -> Effects {
        match reg.offset() {
            sriov::CONTROL_STATUS => self.write_control(write),
            sriov::NUM_VFS_FDL if !self.vf_enable() => {
                self.num_vfs = low_half(write.apply(u32::from(self.num_vfs), 0xffff));
                Effects::NONE
            }
            sriov::SYSTEM_PAGE_SIZE if !self.vf_enable() => {
                let new = write.apply(self.system_page_size, u32::MAX);
                if new.is_power_of_two() && new & sriov::PAGE_SIZES != 0 && new != self.system_page_size {
                    self.set_system_page_size(new);
                }
                Effects::NONE
            }
            offset @ sriov::VF_BAR0..=sriov::VF_BAR5 => {
                let changed = self.bars.write((offset - sriov::VF_BAR0) / 4, write);
                Effects { windows: changed && self.vf_enable() && self.vf_mse(), ..Effects::NONE }
            }
            _ => Effects::NONE,
        }
    }

    fn write_control(&mut self, write: DwordWrite) -> Effects {
        let before = self.control;
        let visible = self.num_visible();
        let mut writable = sriov::VF_ENABLE | sriov::VF_MSE;
        if self.num_vfs > self.shape.total_vfs {
            writable &= !sriov::VF_ENABLE;
        }
        self.control = low_half(write.apply(u32::from(before), u32::from(writable)));
        let vfs = match (before & sriov::VF_ENABLE != 0, self.vf_enable()) {
            (false, true) => Some(VfChange::Enabled { num_vfs: self.num_visible() }),
            (true, false) => Some(VfChange::Disabled { num_vfs: visible }),
            _ => None,
        };
        let toggled = vfs.is_some();
        Effects { windows: self.control != before, messages: toggled, queues: toggled, vfs, reset: None }
    }

    fn set_system_page_size(&mut self, register: u32) {
        self.system_page_size = register;
        self.bars.set_granule(u64::from(register) << 12);
    }

    /// Returns to the state of power-on. The VFs cease to exist.
    pub fn reset(&mut self) -> Effects {
        let disabled = self.vf_enable().then(|| VfChange::Disabled { num_vfs: self.num_visible() });
        self.control = 0;
        self.num_vfs = 0;
        self.bars.reset();
        self.set_system_page_size(1);
        let toggled = disabled.is_some();
        Effects { windows: toggled, messages: toggled, queues: toggled, vfs: disabled, reset: None }
    }
}

fn low_half(value: u32) -> u16 {
    let [low, high, _, _] = value.to_le_bytes();
    u16::from_le_bytes([low, high])
}

#[cfg(test)]
#[path = "sriov_tests.rs"]
mod tests;
