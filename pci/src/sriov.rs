//! The SR-IOV extended capability of a PF (`PCIe 6.2 §9.3.3`).
//!
//! The registers are the only state. The existing VFs, and the addresses that they decode, are computed from the masked
//! registers on demand, and never stored.
//!
//! Choices of this crate for behaviour that the standard leaves undefined:
//! - NumVFs is 0 after reset, holds any value, and is read-only while VF Enable is set. So are System Page Size and ARI
//!   Capable Hierarchy.
//! - VF Enable cannot be set while NumVFs exceeds TotalVFs. It can be set with NumVFs 0, and then no VF exists.
//! - A System Page Size that is not exactly one supported size is refused. After a change, the VF BARs keep the address
//!   bits that remain writable: after a reset, Linux restores the BARs before the page size.

use crate::bar::{BarError, BarSet};
use crate::port::{Ari, PortType, VfRouting};
use crate::spec::{extended_capability_id, sriov};
use crate::{
    BarIndex, BarKind, Dword, DwordWrite, Effects, Refused, ResetKind, Rid, VfChange, VfIndex, Window, WindowId,
};

/// Description of VFs in the SR-IOV capability of a PF.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SriovShape {
    /// TotalVFs and InitialVFs, at least 1.
    pub total_vfs: u16,
    /// First VF Offset: the distance from the PF's routing ID to that of VF 0, at least 1.
    pub first_vf_offset: u16,
    /// VF Stride: the distance between the routing IDs of two VFs, at least 1 with more than one VF.
    pub vf_stride: u16,
    /// VF Device ID: the Device ID by which software identifies the VFs.
    pub vf_device_id: u16,
    /// The VF BARs, each with the size that one VF decodes.
    pub bars: Vec<(BarIndex, BarKind)>,
    /// Function Dependency Link: the PF's own function number if it depends on no other PF. At most 7, or with ARI 255;
    /// a function number of 8 bits is [`Rid::devfn`].
    pub function_dependency_link: u8,
}

/// Reason why an SR-IOV capability is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SriovError {
    /// TotalVFs is 0.
    #[error("an SR-IOV capability needs at least one VF; give it one, or build a function with Role::Plain")]
    NoVfs,
    /// First VF Offset is 0, or VF Stride is 0 with more than one VF, so that two functions would share a routing ID.
    #[error(
        "First VF Offset {first_vf_offset} and VF Stride {vf_stride} give two functions one routing ID; both must be 1 \
         or more"
    )]
    Overlap {
        /// First VF Offset.
        first_vf_offset: u16,
        /// VF Stride.
        vf_stride: u16,
    },
    /// The last VF's routing ID is beyond `FF:1f.7`, for any PF, or for the PF at its address.
    #[error(
        "{total_vfs} VFs do not fit the routing IDs of a segment; give fewer, or the place that Topology::place returns"
    )]
    RoutingIds {
        /// TotalVFs.
        total_vfs: u16,
    },
    /// The VF BARs are impossible.
    #[error("VF {0}")]
    Bar(#[from] BarError),
    /// All VFs together need more memory than the VF BAR can address.
    #[error(
        "VF BAR {index}: {total_vfs} VFs of {size:#x} bytes do not fit its address space; give fewer or a 64-bit BAR"
    )]
    AddressSpace {
        /// The VF BAR.
        index: BarIndex,
        /// TotalVFs.
        total_vfs: u16,
        /// The bytes that one VF takes with pages of 4 KiB.
        size: u64,
    },
    /// The PF is an Endpoint without ARI.
    #[error("an Endpoint with SR-IOV needs the ARI capability; give its PortType one, and the same to its VFs")]
    NoAri,
    /// Function Dependency Link names a function that cannot exist.
    #[error("Function Dependency Link {0}: without ARI, functions are 0 to 7; give the PF's function number")]
    FunctionDependencyLink(u8),
    /// The port above an Endpoint forwards only to functions 0 to 7 of the Endpoint's own bus until ARI Forwarding is
    /// enabled.
    #[error(
        "First VF Offset {first_vf_offset} and VF Stride {vf_stride} place VFs where a port without ARI Forwarding \
         hides them; \
         start on the next bus (256 or more)"
    )]
    Hidden {
        /// First VF Offset.
        first_vf_offset: u16,
        /// VF Stride.
        vf_stride: u16,
    },
}

/// The registers of the capability.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sriov {
    shape: SriovShape,
    /// The ARI capability of an Endpoint; `None` in a Root Complex Integrated Endpoint.
    ari: Option<Ari>,
    control: u16,
    num_vfs: u16,
    /// The System Page Size register: one bit, bit n for 2^(n+12) bytes.
    system_page_size: u32,
    bars: BarSet,
    /// Number of writes of VF Enable to refuse. Not part of the registers: neither saved nor reset.
    failing_enables: u32,
}

impl Sriov {
    /// Creates the capability of a PF of this type, without any VF enabled.
    ///
    /// # Errors
    ///
    /// Fails if the description of the VFs is invalid, or the PF is an Endpoint without ARI: in a device with SR-IOV,
    /// every function except a Root Complex Integrated Endpoint has it (`§9.3.7`).
    pub fn new(shape: SriovShape, port: &PortType) -> Result<Self, SriovError> {
        let ari = port.endpoint().and_then(|endpoint| endpoint.ari);
        let SriovShape { total_vfs, first_vf_offset, vf_stride, function_dependency_link, .. } = shape;
        if total_vfs == 0 {
            return Err(SriovError::NoVfs);
        }
        if port.endpoint().is_some() && ari.is_none() {
            return Err(SriovError::NoAri);
        }
        let routing = VfRouting { first_vf_offset, vf_stride };
        for routing in std::iter::once(routing).chain(ari.and_then(|ari| ari.vfs)) {
            check_routing(total_vfs, routing)?;
        }
        if ari.is_some() && !(0..8).any(|pf| reachable_without_ari(pf, total_vfs, routing)) {
            return Err(SriovError::Hidden { first_vf_offset, vf_stride });
        }
        if function_dependency_link > 7 && ari.is_none() {
            return Err(SriovError::FunctionDependencyLink(function_dependency_link));
        }
        let bars = BarSet::new(&shape.bars)?;
        for (index, kind) in bars.iter() {
            let size = kind.size().max(1 << 12);
            let all = u128::from(size) * u128::from(total_vfs);
            if all > if matches!(kind, BarKind::Memory32 { .. }) { 1 << 32 } else { 1 << 64 } {
                return Err(SriovError::AddressSpace { index, total_vfs, size });
            }
        }
        let mut this = Self { shape, ari, control: 0, num_vfs: 0, system_page_size: 0, bars, failing_enables: 0 };
        this.set_system_page_size(1);
        Ok(this)
    }

    /// Description of the VFs.
    pub fn shape(&self) -> &SriovShape {
        &self.shape
    }

    /// The VF BARs.
    pub(crate) fn bars(&self) -> &BarSet {
        &self.bars
    }

    /// Checks that the VFs of a PF at `pf` have routing IDs of its segment, and that the port above an Endpoint
    /// forwards requests to all of them.
    ///
    /// # Errors
    ///
    /// [`SriovError::RoutingIds`] and [`SriovError::Hidden`].
    pub(crate) fn check_rid(&self, pf: Rid) -> Result<(), SriovError> {
        let SriovShape { total_vfs, first_vf_offset, vf_stride, .. } = self.shape;
        let routing = VfRouting { first_vf_offset, vf_stride };
        for routing in std::iter::once(routing).chain(self.ari.and_then(|ari| ari.vfs)) {
            let last = u16::try_from(routing.last(total_vfs)).ok();
            last.and_then(|last| pf.checked_add(last)).ok_or(SriovError::RoutingIds { total_vfs })?;
        }
        if self.ari.is_some() && !reachable_without_ari(pf.devfn(), total_vfs, routing) {
            return Err(SriovError::Hidden { first_vf_offset, vf_stride });
        }
        Ok(())
    }

    /// TotalVFs: the number of reserved VFs.
    pub fn total_vfs(&self) -> u16 {
        self.shape.total_vfs
    }

    /// The NumVFs register, 0 to 65535.
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

    /// ARI Capable Hierarchy: the port above forwards to function numbers above 7. Always false in a Root Complex
    /// Integrated Endpoint.
    pub fn ari_capable_hierarchy(&self) -> bool {
        self.control & sriov::ARI_CAPABLE_HIERARCHY != 0
    }

    /// The present First VF Offset and VF Stride: for an Endpoint with ARI they may depend on ARI Capable Hierarchy.
    pub fn routing(&self) -> VfRouting {
        let SriovShape { first_vf_offset, vf_stride, .. } = self.shape;
        let with_ari = self.ari.and_then(|ari| ari.vfs).filter(|_| self.ari_capable_hierarchy());
        with_ari.unwrap_or(VfRouting { first_vf_offset, vf_stride })
    }

    /// Number of VFs that exist now: NumVFs if VF Enable is set, else 0. Never above TotalVFs.
    pub fn num_visible(&self) -> u16 {
        if self.vf_enable() { self.num_vfs.min(self.shape.total_vfs) } else { 0 }
    }

    /// The routing ID of VF `index` of the PF `pf`, existing or not; `None` from TotalVFs on.
    pub fn vf_rid(&self, pf: Rid, index: VfIndex) -> Option<Rid> {
        (index.0 < self.shape.total_vfs).then(|| self.routing().vf_rid(pf, index))
    }

    /// The existing VF of the PF `pf` with the routing ID `rid`.
    pub fn vf_index(&self, pf: Rid, rid: Rid) -> Option<VfIndex> {
        let VfRouting { first_vf_offset, vf_stride } = self.routing();
        let distance = rid.to_bits().wrapping_sub(pf.to_bits()).checked_sub(first_vf_offset)?;
        // With a single VF the stride may be 0.
        let index = if distance == 0 { 0 } else { distance.checked_div(vf_stride)? };
        (distance == index.wrapping_mul(vf_stride) && index < self.num_visible()).then_some(VfIndex(index))
    }

    /// The bytes of VF BAR `bar` that one VF takes: the larger of its size and the System Page Size. 0 if there is no
    /// such VF BAR.
    pub fn aperture(&self, bar: BarIndex) -> u64 {
        self.bars.aperture(bar).unwrap_or(0)
    }

    /// The VF whose slice of the window of VF BAR `bar` contains the byte `offset`, and the offset in that slice;
    /// `None` beyond the last existing VF.
    pub fn locate(&self, bar: BarIndex, offset: u64) -> Option<(VfIndex, u64)> {
        let aperture = self.bars.aperture(bar)?;
        let index = u16::try_from(offset.checked_div(aperture)?).ok()?;
        (index < self.num_visible()).then_some((VfIndex(index), offset % aperture))
    }

    /// Appends a window for each VF BAR, with the slices of all existing VFs, if VF Enable and VF MSE are set. A BAR
    /// whose slices would pass the end of its address space is not decoded.
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
            sriov::CAPABILITIES if self.ari.is_some() => sriov::ARI_CAPABLE_HIERARCHY_PRESERVED,
            sriov::CONTROL_STATUS => pair(self.control, 0),
            sriov::INITIAL_TOTAL_VFS => pair(self.shape.total_vfs, self.shape.total_vfs),
            sriov::NUM_VFS_FDL => pair(self.num_vfs, u16::from(self.shape.function_dependency_link)),
            sriov::OFFSET_STRIDE => {
                let VfRouting { first_vf_offset, vf_stride } = self.routing();
                pair(first_vf_offset, vf_stride)
            }
            sriov::VF_DEVICE_ID => pair(0, self.shape.vf_device_id),
            sriov::SUPPORTED_PAGE_SIZES => sriov::PAGE_SIZES,
            sriov::SYSTEM_PAGE_SIZE => self.system_page_size,
            offset @ sriov::VF_BAR0..=sriov::VF_BAR5 => self.bars.read((offset - sriov::VF_BAR0) / 4),
            // VF migration is not supported.
            _ => 0,
        }
    }

    /// Writes the dword at `reg` from the start of the capability.
    pub fn write(&mut self, reg: Dword, write: DwordWrite) -> Effects {
        match reg.offset() {
            sriov::CONTROL_STATUS => self.write_control(write),
            sriov::NUM_VFS_FDL => self.write_num_vfs(write),
            sriov::SYSTEM_PAGE_SIZE => self.write_system_page_size(write),
            offset @ sriov::VF_BAR0..=sriov::VF_BAR5 => {
                let changed = self.bars.write((offset - sriov::VF_BAR0) / 4, write);
                Effects { windows: changed && self.vf_enable() && self.vf_mse(), ..Effects::NONE }
            }
            _ => Effects::NONE,
        }
    }

    fn write_num_vfs(&mut self, write: DwordWrite) -> Effects {
        let written = low_half(write.apply(u32::from(self.num_vfs), 0xffff));
        if written != self.num_vfs && self.vf_enable() {
            return Effects::refused(Refused::NumVfs { written });
        }
        self.num_vfs = written;
        Effects::NONE
    }

    fn write_system_page_size(&mut self, write: DwordWrite) -> Effects {
        let written = write.apply(self.system_page_size, u32::MAX);
        if written == self.system_page_size {
            return Effects::NONE;
        }
        if self.vf_enable() {
            return Effects::refused(Refused::SystemPageSizeLocked { written });
        }
        if !written.is_power_of_two() || written & sriov::PAGE_SIZES == 0 {
            return Effects::refused(Refused::SystemPageSize { written });
        }
        self.set_system_page_size(written);
        Effects::NONE
    }

    fn write_control(&mut self, write: DwordWrite) -> Effects {
        let before = self.control;
        let visible = self.num_visible();
        let ari = if self.ari.is_some() { sriov::ARI_CAPABLE_HIERARCHY } else { 0 };
        let wanted = low_half(write.apply(before.into(), (sriov::VF_ENABLE | sriov::VF_MSE | ari).into()));
        let mut refused = None;
        self.control = wanted;
        // Existing VFs must not change their routing IDs.
        if before & sriov::VF_ENABLE != 0 && (before ^ wanted) & ari != 0 {
            self.control ^= ari;
            refused = Some(Refused::AriCapableHierarchy);
        }
        let (num_vfs, total_vfs) = (self.num_vfs, self.shape.total_vfs);
        if wanted & sriov::VF_ENABLE != 0 && num_vfs > total_vfs {
            self.control &= !sriov::VF_ENABLE;
            refused = Some(Refused::VfEnable { num_vfs, total_vfs });
        }
        if self.failing_enables > 0 && before & sriov::VF_ENABLE == 0 && self.vf_enable() {
            self.failing_enables -= 1;
            self.control &= !sriov::VF_ENABLE;
            refused = Some(Refused::FailingEnable);
        }
        let vfs = match (before & sriov::VF_ENABLE != 0, self.vf_enable()) {
            (false, true) => Some(VfChange::Enabled { num_vfs: self.num_visible() }),
            (true, false) => Some(VfChange::Disabled { num_vfs: visible }),
            _ => None,
        };
        let toggled = vfs.is_some();
        let decode = sriov::VF_ENABLE | sriov::VF_MSE;
        let windows = (self.control ^ before) & decode != 0;
        Effects { windows, messages: toggled, queues: toggled, vfs, refused, ..Effects::NONE }
    }

    /// Makes the next `count` writes that would set VF Enable leave it clear, as a device does that fails, for tests of
    /// drivers. 0 ends this. Resets do not change the number, and it is not saved.
    pub(crate) fn fail_enables(&mut self, count: u32) {
        self.failing_enables = count;
    }

    fn set_system_page_size(&mut self, register: u32) {
        self.system_page_size = register;
        self.bars.set_granule(u64::from(register) << 12);
    }

    /// Returns to the power-on state. The VFs cease to exist. ARI Capable Hierarchy, a property of the port above,
    /// survives a function level reset (`§9.3.3.3.5`).
    pub fn reset(&mut self, kind: ResetKind) -> Effects {
        let disabled = self.vf_enable().then(|| VfChange::Disabled { num_vfs: self.num_visible() });
        self.control &= match kind {
            ResetKind::Conventional => 0,
            ResetKind::Flr => sriov::ARI_CAPABLE_HIERARCHY,
        };
        self.num_vfs = 0;
        self.bars.reset();
        self.set_system_page_size(1);
        let toggled = disabled.is_some();
        Effects { windows: toggled, messages: toggled, queues: toggled, vfs: disabled, ..Effects::NONE }
    }
}

/// Checks that the PF and its VFs have different routing IDs.
fn check_routing(total_vfs: u16, routing: VfRouting) -> Result<(), SriovError> {
    let VfRouting { first_vf_offset, vf_stride } = routing;
    if first_vf_offset == 0 || vf_stride == 0 && total_vfs > 1 {
        return Err(SriovError::Overlap { first_vf_offset, vf_stride });
    }
    if routing.last(total_vfs) > u32::from(u16::MAX) {
        return Err(SriovError::RoutingIds { total_vfs });
    }
    Ok(())
}

/// True if a port without ARI Forwarding forwards requests to all VFs of the PF with the function number `pf`: on the
/// PF's bus it forwards only to functions 0 to 7.
fn reachable_without_ari(pf: u8, total_vfs: u16, VfRouting { first_vf_offset, vf_stride }: VfRouting) -> bool {
    (0..u32::from(total_vfs)).all(|index| {
        let vf = u32::from(pf) + u32::from(first_vf_offset) + u32::from(vf_stride) * index;
        !(8..=0xff).contains(&vf)
    })
}

fn low_half(value: u32) -> u16 {
    let [low, high, _, _] = value.to_le_bytes();
    u16::from_le_bytes([low, high])
}

#[cfg(test)]
#[path = "sriov_tests.rs"]
mod tests;
