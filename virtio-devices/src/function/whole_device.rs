//! A function that is neither a PF nor a VF: a device of its own.

use std::sync::Arc;

use pci::{Device, Dword, DwordWrite, Function, Reach, ResetKind, Rid, VfIndex, Window, WindowId};

use super::VirtioFunction;
use super::host::queues_changed;
use crate::os::thread::Thread;
use crate::{
    ConnectError, DeviceState, Fault, FaultError, FunctionStatus, HostNic, Inspect, Lifecycle, MemoryUser,
    NeedsResetObserver, NewBackend, NotResumed, Outcome, SriovStatus, StateError, VirtioDevice,
};

/// A function that is neither a PF nor a VF is a whole device.
impl<D: VirtioDevice> Device for VirtioFunction<D> {
    type Stopping = Thread;

    fn config_read(&self, rid: Rid, reg: Dword) -> u32 {
        if rid == self.rid { Function::config_read(self, reg) } else { pci::spec::ALL_ONES }
    }

    fn config_write(&mut self, rid: Rid, reg: Dword, write: DwordWrite) -> Outcome {
        if rid == self.rid { Function::config_write(self, reg, write, true) } else { Outcome::none() }
    }

    fn mmio_read(&mut self, window: WindowId, offset: u64, data: &mut [u8]) {
        match window {
            WindowId::Bar(bar) => self.bar_read(bar, offset, data),
            WindowId::VfBar(_) => data.fill(0xff),
        }
    }

    fn mmio_write(&mut self, window: WindowId, offset: u64, data: &[u8]) -> Outcome {
        match window {
            WindowId::Bar(bar) => self.bar_write(bar, offset, data, true),
            WindowId::VfBar(_) => Outcome::none(),
        }
    }

    fn may_send(&self, rid: Rid) -> bool {
        rid == self.rid && self.config.bus_master()
    }

    fn windows(&self, out: &mut Vec<Window>) {
        self.config.windows(out);
    }

    fn reset(&mut self, kind: ResetKind) -> Outcome {
        Function::reset(self, kind, true)
    }
}

impl<D: VirtioDevice> Inspect for VirtioFunction<D> {
    fn config_is_static(&self, _rid: Rid) -> bool {
        self.is_config_static()
    }

    fn function_status(&self, vf: Option<VfIndex>) -> Option<FunctionStatus> {
        vf.is_none().then(|| FunctionStatus {
            exists: true,
            removed: false,
            driver: self.status(),
            stopped_by: self.stopped_by(true),
            reset_by: self.reset_by,
            conventional_resets: self.conventional_resets,
        })
    }

    fn sriov_status(&self) -> Option<SriovStatus> {
        None
    }

    fn host_nic(&mut self, vf: Option<VfIndex>) -> Option<&mut dyn HostNic> {
        if vf.is_none() { self.device.host_nic() } else { None }
    }

    fn observe_needs_reset(&self, observer: &Arc<NeedsResetObserver>) {
        Self::observe_needs_reset(self, observer);
    }

    fn broken_rings(&self, vf: Option<VfIndex>) -> Vec<String> {
        if vf.is_none() { Self::broken_rings(self) } else { Vec::new() }
    }

    fn log_drivers(&mut self, name: &dyn Fn(Option<VfIndex>) -> String) {
        self.log_driver(&name(None));
    }

    fn memory_users(&self, out: &mut Vec<(Option<VfIndex>, MemoryUser)>) {
        out.extend(self.device.memory_user().map(|user| (None, user)));
    }
}

impl<D: VirtioDevice> Lifecycle for VirtioFunction<D> {
    fn pause(&mut self) -> Outcome {
        queues_changed(Reach::Function(self.rid), self.hold())
    }

    fn resume(&mut self) -> Outcome {
        queues_changed(Reach::Function(self.rid), self.release(true))
    }

    fn pause_function(&mut self, vf: Option<VfIndex>) -> Outcome {
        if vf.is_none() { self.pause() } else { Outcome::none() }
    }

    fn resume_function(&mut self, vf: Option<VfIndex>) -> Outcome {
        if vf.is_none() { self.resume() } else { Outcome::none() }
    }

    fn connect(&mut self, vf: Option<VfIndex>, new: &mut NewBackend) -> Result<(), ConnectError> {
        if vf.is_none() { Self::connect(self, new) } else { Err(ConnectError::NoNic) }
    }

    fn inject(&mut self, vf: Option<VfIndex>, fault: Fault) -> Result<Outcome, FaultError> {
        if vf.is_none() { Self::inject(self, fault, true) } else { Err(FaultError::NoVf) }
    }

    fn take_not_resumed(&mut self) -> Option<NotResumed> {
        Self::take_not_resumed(self).map(|error| NotResumed { vf: None, error })
    }

    fn save(&self) -> Result<Option<DeviceState>, StateError> {
        self.save_device(None).map(Some)
    }

    fn restore(&mut self, state: &DeviceState) -> Result<(), StateError> {
        self.restore_alone(state)
    }
}
