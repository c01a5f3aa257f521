//! A PF and its VFs as one PCI device.
//!
//! All VFs are there from the start, each with its device behind it; VF Enable gates whether they can be seen. What exists
//! follows from the PF's registers at each access and is kept nowhere else. A VF that cannot be seen is in its reset state.

mod state;

use std::sync::Arc;
use std::thread::JoinHandle;

use pci::{
    BarIndex, Device, Dword, DwordWrite, Effects, Placement, ResetKind, Rid, Role, Sriov, SriovShape, VfChange,
    VfIndex, Window, WindowId,
};

use crate::function::{FunctionError, REGISTERS_BAR, Spacing, VirtioFunction, device_id};
use crate::{
    DeviceState, Doorbell, DoorbellObserver, FunctionStatus, Memory, Message, Port, SriovStatus, StateError,
    VirtioDevice, VirtioPci,
};

/// Why devices cannot be a PF and its VFs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NetSriovError {
    /// The place was made for another number of VFs, at least 1.
    #[error("{vfs} VFs at a place that reserves {reserved}")]
    Count {
        /// How many there are.
        vfs: usize,
        /// How many are reserved.
        reserved: u16,
    },
    /// A VF has another number of queues than VF 0, and thereby other BARs and another MSI-X table; the PF describes only one
    /// kind of VF (`PCIe 6.2 §9.2.1.1`).
    #[error("VF {index} has {queues} queues and VF 0 has {expected}; all VFs of a PF must have the same number")]
    Queues {
        /// The VF.
        index: VfIndex,
        /// Its queues.
        queues: usize,
        /// VF 0's queues.
        expected: usize,
    },
    /// A VF is another kind of device than its PF (`PCIe 6.2 §9.3.4.1.6`).
    #[error("VF {index} is a device of another type than its PF")]
    Kind {
        /// The VF.
        index: VfIndex,
    },
    /// A VF cannot be a function.
    #[error("VF {index}: {error}")]
    Vf {
        /// The VF.
        index: VfIndex,
        /// Why.
        error: FunctionError,
    },
    /// The PF cannot be a function.
    #[error("PF: {0}")]
    Pf(FunctionError),
}

/// A PF and its VFs.
pub struct NetSriov<D> {
    pf: VirtioFunction<D>,
    vfs: Vec<VirtioFunction<D>>,
    stopping: Vec<JoinHandle<()>>,
}

/// A function that exists.
enum Target {
    Pf,
    Vf(VfIndex),
}

impl<D: VirtioDevice> NetSriov<D> {
    /// A PF with one VF for each of `vfs`, in order.
    ///
    /// # Errors
    ///
    /// When they cannot be the functions of one device, or do not fit the place.
    pub fn new(pf: D, vfs: Vec<D>, placement: Placement, memory: &Memory) -> Result<Self, NetSriovError> {
        let first = Self::check(&pf, &vfs)?;
        let place = placement.vfs.filter(|place| usize::from(place.total_vfs) == vfs.len());
        let (Some(place), Some(first)) = (place, first) else {
            let reserved = placement.vfs.map_or(0, |place| place.total_vfs);
            return Err(NetSriovError::Count { vfs: vfs.len(), reserved });
        };
        // All VFs look alike, whatever the backend of each.
        let spacing = Spacing::of(&vfs);
        let bars = VirtioFunction::bars(first, spacing)
            .map_err(|error| NetSriovError::Vf { index: VfIndex(0), error: FunctionError::Queue(error) })?;
        let shape = SriovShape {
            total_vfs: place.total_vfs,
            first_vf_offset: place.first_vf_offset,
            vf_stride: place.vf_stride,
            vf_device_id: device_id(first.device_type()),
            bars,
            function_dependency_link: placement.rid.function(),
        };
        let role = Role::Pf(shape);
        let role = (role, Spacing::of([&pf]));
        let pf = VirtioFunction::new(pf, placement.rid, role, memory.clone()).map_err(NetSriovError::Pf)?;
        let vfs = (0..).map(VfIndex).zip(vfs).map(|(index, device)| {
            let rid = place.vf_rid(placement.rid, index);
            VirtioFunction::new(device, rid, (Role::Vf, spacing), memory.clone())
                .map_err(|error| NetSriovError::Vf { index, error })
        });
        Ok(Self { pf, vfs: vfs.collect::<Result<_, _>>()?, stopping: Vec::new() })
    }

    /// Checks that `vfs` all look like the first one, which it returns, and are what `pf` is.
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

    /// The PF.
    pub fn pf(&self) -> &VirtioFunction<D> {
        &self.pf
    }

    /// The PF, to change what is the host's to change.
    pub fn pf_mut(&mut self) -> &mut VirtioFunction<D> {
        &mut self.pf
    }

    /// The VF `index`, whether it can be seen or not; `None` for an index of TotalVFs and more.
    pub fn vf(&self, index: VfIndex) -> Option<&VirtioFunction<D>> {
        self.vfs.get(usize::from(index.0))
    }

    /// The VF `index`, to change what is the host's to change.
    pub fn vf_mut(&mut self, index: VfIndex) -> Option<&mut VirtioFunction<D>> {
        self.vfs.get_mut(usize::from(index.0))
    }

    /// The SR-IOV capability.
    pub fn sriov(&self) -> Option<&Sriov> {
        self.pf.config().sriov()
    }

    fn num_visible(&self) -> u16 {
        self.sriov().map_or(0, Sriov::num_visible)
    }

    fn visible(&self) -> impl Iterator<Item = (VfIndex, &VirtioFunction<D>)> {
        (0..self.num_visible()).map(VfIndex).zip(&self.vfs)
    }

    fn functions_mut(&mut self) -> impl Iterator<Item = &mut VirtioFunction<D>> {
        std::iter::once(&mut self.pf).chain(&mut self.vfs)
    }

    fn drain_stopping(&mut self) {
        let Self { pf, vfs, stopping } = self;
        std::iter::once(pf).chain(vfs).for_each(|function| function.drain_stopping(stopping));
    }

    /// The function that exists at `rid`.
    fn target(&self, rid: Rid) -> Option<Target> {
        if rid == self.pf.rid() {
            return Some(Target::Pf);
        }
        self.sriov()?.vf_index(self.pf.rid(), rid).map(Target::Vf)
    }

    fn function(&self, rid: Rid) -> Option<&VirtioFunction<D>> {
        match self.target(rid)? {
            Target::Pf => Some(&self.pf),
            Target::Vf(index) => self.vf(index),
        }
    }

    /// The VF whose slice of VF BAR `bar` is at `offset` of the window, and the offset in the slice.
    fn locate(&self, bar: BarIndex, offset: u64) -> Option<(VfIndex, u64)> {
        let sriov = self.sriov().filter(|sriov| sriov.vf_mse() && self.powered())?;
        sriov.locate(bar, offset)
    }

    /// Whether the PF is in D0. A VF has no power state of its own and follows the PF's (`PCIe 6.2 §9.6.3`).
    fn powered(&self) -> bool {
        self.pf.config().is_d0()
    }

    /// Appends the doorbells of the VF `index`, which exists.
    fn vf_doorbells(&self, index: VfIndex, vf: &VirtioFunction<D>, out: &mut Vec<Doorbell>) {
        let aperture = self.sriov().map_or(0, |sriov| sriov.aperture(REGISTERS_BAR));
        vf.doorbells(WindowId::VfBar(REGISTERS_BAR), aperture.saturating_mul(index.0.into()), out);
    }

    /// Lets the VFs follow what happened to their PF.
    fn follow(&mut self, effects: Effects) -> Effects {
        if let Some(VfChange::Disabled { num_vfs }) = effects.vfs {
            for vf in self.vfs.iter_mut().take(usize::from(num_vfs)) {
                // Nobody can see it, and it has no window any more: what changed is in the PF's effects.
                let _ = vf.reset_function(ResetKind::Conventional);
                vf.drain_stopping(&mut self.stopping);
            }
        }
        if effects.queues {
            let powered = self.powered();
            let visible = usize::from(self.num_visible());
            for vf in self.vfs.iter_mut().take(visible) {
                vf.settle(powered);
                vf.drain_stopping(&mut self.stopping);
            }
        }
        self.pf.drain_stopping(&mut self.stopping);
        effects
    }

    /// Lets `change` happen to a VF.
    fn with_vf(&mut self, index: VfIndex, change: impl FnOnce(&mut VirtioFunction<D>, bool) -> Effects) -> Effects {
        let powered = self.powered();
        let Some(vf) = self.vfs.get_mut(usize::from(index.0)) else { return Effects::NONE };
        let had_queues = vf.has_queues();
        let effects = change(vf, powered);
        vf.drain_stopping(&mut self.stopping);
        if had_queues || vf.has_queues() {
            return effects;
        }
        // A VF without queues wants nothing of its host. Its driver makes a dozen writes until it has some, and for each of
        // them the host would look at what all the VFs want.
        Effects { messages: false, queues: false, ..effects }
    }
}

impl<D: VirtioDevice> Device for NetSriov<D> {
    fn config_read(&self, rid: Rid, reg: Dword) -> u32 {
        self.function(rid).map_or(pci::spec::ALL_ONES, |function| function.config_read(reg))
    }

    fn config_write(&mut self, rid: Rid, reg: Dword, write: DwordWrite) -> Effects {
        match self.target(rid) {
            Some(Target::Pf) => {
                let effects = self.pf.config_write(reg, write, true);
                self.follow(effects)
            }
            Some(Target::Vf(index)) => self.with_vf(index, |vf, powered| vf.config_write(reg, write, powered)),
            None => Effects::NONE,
        }
    }

    fn mmio_read(&mut self, window: WindowId, offset: u64, data: &mut [u8]) {
        let (function, bar, offset) = match window {
            WindowId::Bar(bar) => (Some(&self.pf), bar, offset),
            WindowId::VfBar(bar) => match self.locate(bar, offset) {
                Some((index, offset)) => (self.vf(index), bar, offset),
                None => (None, bar, offset),
            },
        };
        match function {
            Some(function) => function.bar_read(bar, offset, data),
            None => data.fill(0xff),
        }
    }

    fn mmio_write(&mut self, window: WindowId, offset: u64, data: &[u8]) -> Effects {
        match window {
            WindowId::Bar(bar) => {
                let effects = self.pf.bar_write(bar, offset, data, true);
                self.follow(effects)
            }
            WindowId::VfBar(bar) => match self.locate(bar, offset) {
                Some((index, offset)) => self.with_vf(index, |vf, powered| vf.bar_write(bar, offset, data, powered)),
                None => Effects::NONE,
            },
        }
    }

    fn windows(&self, out: &mut Vec<Window>) {
        self.pf.config().windows(out);
    }

    fn reset(&mut self, kind: ResetKind) -> Effects {
        let effects = self.pf.reset_function(kind);
        self.follow(effects)
    }
}

impl<D: VirtioDevice> VirtioPci for NetSriov<D> {
    fn doorbells(&self, out: &mut Vec<Doorbell>) {
        self.pf.doorbells(WindowId::Bar(REGISTERS_BAR), 0, out);
        self.visible().for_each(|(index, vf)| self.vf_doorbells(index, vf, out));
    }

    fn messages(&self, out: &mut Vec<Message>) {
        self.pf.messages(out);
        if self.powered() {
            self.visible().for_each(|(_, vf)| vf.messages(out));
        }
    }

    fn vf_at(&self, window: WindowId, offset: u64) -> Option<Rid> {
        let WindowId::VfBar(bar) = window else { return None };
        let (index, _) = self.locate(bar, offset)?;
        self.vf(index).map(VirtioFunction::rid)
    }

    fn vf_wants(&self, rid: Rid, doorbells: &mut Vec<Doorbell>, messages: &mut Vec<Message>) {
        let Some(Target::Vf(index)) = self.target(rid) else { return };
        let Some(vf) = self.vf(index) else { return };
        self.vf_doorbells(index, vf, doorbells);
        if self.powered() {
            vf.messages(messages);
        }
    }

    fn observe_doorbells(&self, observer: &Arc<DoorbellObserver>) {
        std::iter::once(&self.pf).chain(&self.vfs).for_each(|function| function.observe_doorbells(observer));
    }

    fn num_visible(&self) -> u16 {
        self.num_visible()
    }

    fn config_is_static(&self, rid: Rid) -> bool {
        self.function(rid).is_none_or(VirtioFunction::config_is_static)
    }

    fn take_stopping(&mut self) -> Vec<JoinHandle<()>> {
        std::mem::take(&mut self.stopping)
    }

    fn function_status(&self, vf: Option<VfIndex>) -> Option<FunctionStatus> {
        let Some(index) = vf else { return Some(FunctionStatus { exists: true, driver: self.pf.status() }) };
        Some(FunctionStatus { exists: index.0 < self.num_visible(), driver: self.vf(index)?.status() })
    }

    fn sriov_status(&self) -> Option<SriovStatus> {
        self.sriov().map(|sriov| SriovStatus { num_vfs: sriov.num_vfs(), vf_enable: sriov.vf_enable() })
    }

    fn port(&mut self, vf: Option<VfIndex>) -> Option<&mut dyn Port> {
        let function = match vf {
            Some(index) => self.vfs.get_mut(usize::from(index.0))?,
            None => &mut self.pf,
        };
        function.device_mut().port()
    }

    fn pause(&mut self) {
        // Those that nobody can see, too: they may be enabled meanwhile.
        self.functions_mut().for_each(VirtioFunction::pause);
        self.drain_stopping();
    }

    fn resume(&mut self) {
        self.pf.resume(true);
        let powered = self.powered();
        self.vfs.iter_mut().for_each(|vf| vf.resume(powered));
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
