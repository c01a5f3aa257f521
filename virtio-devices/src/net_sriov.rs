//! A virtio PF and its VFs as one PCI device.
//!
//! SR-IOV itself is in [`PfWithVfs`]. This file adds the virtio part: the devices that can be VFs of one PF, their
//! doorbells and messages, and their saved state.

mod state;

use std::sync::Arc;

use pci::{
    Device, Dword, DwordWrite, PfError, PfWithVfs, Placement, Reach, ResetKind, Rid, Role, Sriov, SriovShape, VfIndex,
    Window, WindowId,
};

use crate::function::host::queues_changed;
use crate::function::{FunctionError, REGISTERS_BAR, Spacing, VirtioFunction, device_id};
use crate::os::thread::Thread;
use crate::{
    ConnectError, DeviceState, Doorbell, DoorbellObserver, Fault, FaultError, FunctionStatus, HostNic, Inspect,
    IommuAttachment, Lifecycle, Memory, MemoryUser, Message, NeedsResetObserver, NewBackend, NotResumed, Outcome,
    ResetBy, Signals, SriovStatus, StateError, VirtioDevice,
};

/// Reason why devices cannot form a PF and its VFs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NetSriovError {
    /// The placement is for another number of VFs, at least 1.
    #[error("{vfs} VFs at a place that reserves {reserved}")]
    Count {
        /// Number of VFs given.
        vfs: usize,
        /// Number of VFs reserved.
        reserved: u16,
    },
    /// A VF has more or fewer queues than VF 0, and so other BARs and another MSI-X table. The PF describes one kind of
    /// VF only (`PCIe 6.2 §9.2.1.1`).
    #[error("VF {index} has {queues} queues and VF 0 has {expected}; all VFs of a PF must have the same number")]
    Queues {
        /// The VF.
        index: VfIndex,
        /// Number of its queues.
        queues: usize,
        /// VF 0's queues.
        expected: usize,
    },
    /// A VF is another kind of device than its PF (`PCIe 6.2 §9.3.4.1.6`).
    #[error("VF {index} is not the same type of device as its PF")]
    Kind {
        /// The VF.
        index: VfIndex,
    },
    /// A VF cannot be made a function.
    #[error("VF {index}: {error}")]
    Vf {
        /// The VF.
        index: VfIndex,
        /// Cause.
        error: FunctionError,
    },
    /// The PF cannot be made a function.
    #[error("PF: {0}")]
    Pf(FunctionError),
    /// The functions cannot be a PF and its VFs.
    #[error(transparent)]
    Device(#[from] PfError),
}

/// A virtio PF and its VFs.
pub struct NetSriov<D> {
    functions: PfWithVfs<VirtioFunction<D>>,
}

impl<D: VirtioDevice> NetSriov<D> {
    /// Creates a PF with one VF for each of `vfs`, in order.
    ///
    /// # Errors
    ///
    /// Fails if they cannot form one device, or `placement` is for another number of VFs.
    pub fn new(pf: D, vfs: Vec<D>, placement: Placement, memory: &Memory) -> Result<Self, NetSriovError> {
        let first = Self::check(&pf, &vfs)?;
        let place = placement.vfs.filter(|place| usize::from(place.total_vfs) == vfs.len());
        let (Some(place), Some(first)) = (place, first) else {
            let reserved = placement.vfs.map_or(0, |place| place.total_vfs);
            return Err(NetSriovError::Count { vfs: vfs.len(), reserved });
        };
        // All VFs look alike, whatever their backends.
        let spacing = Spacing::of(&vfs);
        let bars = VirtioFunction::bars(first, spacing)
            .map_err(|error| NetSriovError::Vf { index: VfIndex(0), error: FunctionError::Queue(error) })?;
        let shape = SriovShape::new(placement.rid, place, device_id(first.device_type()), bars);
        let role = (Role::Pf(shape), Spacing::of([&pf]));
        let pf = VirtioFunction::new(pf, placement.rid, role, memory.clone().into()).map_err(NetSriovError::Pf)?;
        let vfs = (0..).map(VfIndex).zip(vfs).map(|(index, device)| {
            let rid = place.vf_rid(placement.rid, index);
            VirtioFunction::new(device, rid, (Role::Vf, spacing), memory.clone().into())
                .map_err(|error| NetSriovError::Vf { index, error })
        });
        Ok(Self { functions: PfWithVfs::new(placement.rid, pf, vfs.collect::<Result<_, _>>()?)? })
    }

    /// Checks that `vfs` all have as many queues as the first, which it returns, and are the kind of device that `pf`
    /// is.
    fn check<'v>(pf: &D, vfs: &'v [D]) -> Result<Option<&'v D>, NetSriovError> {
        let Some(first) = vfs.first() else { return Ok(None) };
        let expected = first.queue_sizes().len();
        for (index, vf) in (0..).map(VfIndex).zip(vfs) {
            if vf.device_type() != pf.device_type() || vf.class() != pf.class() {
                return Err(NetSriovError::Kind { index });
            }
            let queues = vf.queue_sizes().len();
            if queues != expected {
                return Err(NetSriovError::Queues { index, queues, expected });
            }
        }
        Ok(Some(first))
    }

    /// Puts each function behind the IOMMU for which `place` returns an [`IommuAttachment`], if any. Must be called
    /// before any access.
    pub fn attach_iommu(&mut self, mut place: impl FnMut(Rid) -> Option<IommuAttachment>) {
        for function in self.functions.functions_mut() {
            if let Some(attachment) = place(function.rid()) {
                function.attach_iommu(attachment);
            }
        }
    }

    /// The PF.
    pub fn pf(&self) -> &VirtioFunction<D> {
        self.functions.pf()
    }

    /// The PF, for changes by the host.
    pub fn pf_mut(&mut self) -> &mut VirtioFunction<D> {
        self.functions.pf_mut()
    }

    /// The VF `index`, enabled or not; `None` from TotalVFs on.
    pub fn vf(&self, index: VfIndex) -> Option<&VirtioFunction<D>> {
        self.functions.vf(index)
    }

    /// The VF `index`, for changes by the host.
    pub fn vf_mut(&mut self, index: VfIndex) -> Option<&mut VirtioFunction<D>> {
        self.functions.vf_mut(index)
    }

    /// The SR-IOV capability.
    pub fn sriov(&self) -> Option<&Sriov> {
        self.functions.sriov()
    }

    /// Appends the doorbells of the VF `index`, which is enabled.
    fn vf_doorbells(&self, index: VfIndex, vf: &VirtioFunction<D>, out: &mut Vec<Doorbell>) {
        if let Some(slice) = self.functions.slice(REGISTERS_BAR, index) {
            vf.doorbells_at(WindowId::VfBar(REGISTERS_BAR), slice, out);
        }
    }

    /// Appends the messages that the VF `vf` may send.
    fn vf_messages(&self, vf: &VirtioFunction<D>, out: &mut Vec<Message>) {
        if self.may_send(vf.rid()) {
            vf.sendable(out);
        }
    }

    /// The PF, or one of its VFs.
    fn function_mut(&mut self, vf: Option<VfIndex>) -> Option<&mut VirtioFunction<D>> {
        match vf {
            Some(index) => self.vf_mut(index),
            None => Some(self.pf_mut()),
        }
    }

    /// The VF at `rid`, if it is enabled.
    fn vf_at(&self, rid: Rid) -> Option<(VfIndex, &VirtioFunction<D>)> {
        let index = self.functions.vf_index(rid)?;
        Some((index, self.vf(index)?))
    }
}

/// SR-IOV is the business of [`PfWithVfs`].
impl<D: VirtioDevice> Device for NetSriov<D> {
    type Stopping = Thread;

    fn config_read(&self, rid: Rid, reg: Dword) -> u32 {
        self.functions.config_read(rid, reg)
    }

    fn config_write(&mut self, rid: Rid, reg: Dword, write: DwordWrite) -> Outcome {
        self.functions.config_write(rid, reg, write)
    }

    fn mmio_read(&mut self, window: WindowId, offset: u64, data: &mut [u8]) {
        self.functions.mmio_read(window, offset, data);
    }

    fn mmio_write(&mut self, window: WindowId, offset: u64, data: &[u8]) -> Outcome {
        self.functions.mmio_write(window, offset, data)
    }

    fn may_send(&self, rid: Rid) -> bool {
        self.functions.may_send(rid)
    }

    fn windows(&self, out: &mut Vec<Window>) {
        self.functions.windows(out);
    }

    fn reset(&mut self, kind: ResetKind) -> Outcome {
        self.functions.reset(kind)
    }
}

impl<D: VirtioDevice> Signals for NetSriov<D> {
    fn doorbells(&self, reach: Reach, out: &mut Vec<Doorbell>) {
        self.pf().doorbells(reach, out);
        match reach {
            Reach::Device => self.functions.visible().for_each(|(index, vf)| self.vf_doorbells(index, vf, out)),
            Reach::Function(rid) => self.vf_at(rid).iter().for_each(|(index, vf)| self.vf_doorbells(*index, vf, out)),
            Reach::Nothing => {}
        }
    }

    fn messages(&self, reach: Reach, out: &mut Vec<Message>) {
        self.pf().messages(reach, out);
        match reach {
            Reach::Device => self.functions.visible().for_each(|(_, vf)| self.vf_messages(vf, out)),
            Reach::Function(rid) => self.vf_at(rid).iter().for_each(|(_, vf)| self.vf_messages(vf, out)),
            Reach::Nothing => {}
        }
    }

    fn observe_doorbells(&self, observer: &Arc<DoorbellObserver>) {
        self.functions.functions().for_each(|function| function.observe_doorbells(observer));
    }
}

impl<D: VirtioDevice> Inspect for NetSriov<D> {
    fn config_is_static(&self, rid: Rid) -> bool {
        self.functions.function(rid).is_none_or(VirtioFunction::is_config_static)
    }

    fn function_status(&self, vf: Option<VfIndex>) -> Option<FunctionStatus> {
        let Some(index) = vf else { return self.pf().function_status(None) };
        let removed = self.functions.is_removed(index);
        let exists = index.0 < self.functions.num_visible() && !removed;
        let vf = self.vf(index)?;
        let reset_by = if removed { ResetBy::Removal } else { vf.reset_by() };
        let stopped_by = vf.stopped_by(self.functions.is_powered());
        let (driver, conventional_resets) = (vf.status(), vf.conventional_resets());
        Some(FunctionStatus { exists, removed, driver, stopped_by, reset_by, conventional_resets })
    }

    fn sriov_status(&self) -> Option<SriovStatus> {
        self.sriov().map(|sriov| SriovStatus {
            num_vfs: sriov.num_vfs(),
            vf_enable: sriov.vf_enable(),
            disabled_by: self.pf().vfs_disabled_by(),
        })
    }

    fn host_nic(&mut self, vf: Option<VfIndex>) -> Option<&mut dyn HostNic> {
        self.function_mut(vf)?.device_mut().host_nic()
    }

    fn observe_needs_reset(&self, observer: &Arc<NeedsResetObserver>) {
        self.functions.functions().for_each(|function| function.observe_needs_reset(observer));
    }

    fn broken_rings(&self, vf: Option<VfIndex>) -> Vec<String> {
        let function = vf.map_or(Some(self.pf()), |index| self.vf(index));
        function.map(VirtioFunction::broken_rings).unwrap_or_default()
    }

    fn log_drivers(&mut self, name: &dyn Fn(Option<VfIndex>) -> String) {
        let functions = std::iter::once(None).chain((0..).map(VfIndex).map(Some)).zip(self.functions.functions_mut());
        functions.for_each(|(vf, function)| function.log_driver(&name(vf)));
    }

    fn memory_users(&self, out: &mut Vec<(Option<VfIndex>, MemoryUser)>) {
        self.pf().memory_users(out);
        let vfs = (0..).map(VfIndex).map_while(|index| Some((index, self.vf(index)?)));
        out.extend(vfs.filter_map(|(index, vf)| Some((Some(index), vf.device().memory_user()?))));
    }
}

impl<D: VirtioDevice> Lifecycle for NetSriov<D> {
    fn pause(&mut self) -> Outcome {
        // A frame in flight between functions must not reach a stopped receiver: it is held until the resume.
        self.pf().device().hold_frames(true);
        // VFs that are not enabled, too: the guest may enable them during the pause.
        let stopping = self.functions.functions_mut().flat_map(VirtioFunction::hold).collect();
        queues_changed(Reach::Device, stopping)
    }

    fn resume(&mut self) -> Outcome {
        let powered = self.functions.is_powered();
        // The VFs follow the power state of the PF.
        self.pf().device().hold_frames(true);
        let stopping = self.functions.functions_mut().flat_map(|function| function.release(powered)).collect();
        self.pf().device().hold_frames(false);
        queues_changed(Reach::Device, stopping)
    }

    fn pause_function(&mut self, vf: Option<VfIndex>) -> Outcome {
        let Some(function) = self.function_mut(vf) else { return Outcome::none() };
        let stopping = function.hold();
        queues_changed(Reach::Function(function.rid()), stopping)
    }

    fn resume_function(&mut self, vf: Option<VfIndex>) -> Outcome {
        let powered = self.functions.is_powered();
        let Some(function) = self.function_mut(vf) else { return Outcome::none() };
        let stopping = function.release(powered);
        queues_changed(Reach::Function(function.rid()), stopping)
    }

    fn connect(&mut self, vf: Option<VfIndex>, new: &mut NewBackend) -> Result<(), ConnectError> {
        self.function_mut(vf).ok_or(ConnectError::NoNic)?.connect(new)
    }

    fn inject(&mut self, vf: Option<VfIndex>, fault: Fault) -> Result<Outcome, FaultError> {
        let powered = self.functions.is_powered();
        match (vf, fault) {
            (None, Fault::RefuseVfEnable { count }) => {
                self.functions.fail_enables(count);
                Ok(Outcome::none())
            }
            (Some(index), Fault::Removal) => self.functions.remove_vf(index).ok_or(FaultError::NoVf),
            (vf, fault) => self.function_mut(vf).ok_or(FaultError::NoVf)?.inject(fault, powered),
        }
    }

    fn take_not_resumed(&mut self) -> Option<NotResumed> {
        let functions = std::iter::once(None).chain((0..).map(VfIndex).map(Some)).zip(self.functions.functions_mut());
        functions.filter_map(|(vf, function)| Some(NotResumed { vf, error: function.take_not_resumed()? })).next()
    }

    fn save(&self) -> Result<Option<DeviceState>, StateError> {
        self.save_all().map(Some)
    }

    fn restore(&mut self, state: &DeviceState) -> Result<(), StateError> {
        self.restore_all(state)
    }
}

#[cfg(test)]
mod conformance;
#[cfg(test)]
mod tests;
