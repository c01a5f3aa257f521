//! A vDPA device of the host: `/dev/vhost-vdpa-N`.
//!
//! The device runs the queues. It is part of a network card, or a process of the host (VDUSE). Doorbells and interrupts
//! are eventfds.
//!
//! **Memory.** When its NIC is plugged in, the device is opened and gets access to all guest memory. The guest cannot
//! change that, provided that a device reset keeps the mappings:
//!
//! - Since Linux 6.7, a driver that used to forget them offers to keep them (`VHOST_BACKEND_F_IOTLB_PERSIST`), which is
//!   accepted here.
//! - Since then, a driver that does not offer this has always kept them: VDUSE.
//! - Before 6.7 the driver's behaviour is unknown. The memory is mapped again, in one batch, before the first start
//!   after a reset.
//!
//! **Control queue.** A device with a control queue runs it, provided that its number of pairs equals the NIC's, or the
//! NIC has one pair. Without one, the NIC serves commands only if the device has no address: a device with an address
//! filters by it and would not learn of a new one.
//!
//! **Pauses.** After a reset, queues continue where the used ring ends, because the device has forgotten the buffers it
//! held. A device that can be suspended and resumed is not reset by a pause, and keeps the state that its control queue
//! set. A device that can neither resume nor take a queue position, such as one behind vp_vdpa, cannot continue after a
//! pause, so its driver is asked to reset the NIC. The same applies if the device's own control queue had received
//! commands before a reset or a loss, because only the device has their state. Such devices, and all with a control
//! queue, keep running while the host has the link down: a driver waits without limit for the answer to a command.
//!
//! **Doorbell pages.** A device may have one page per doorbell. The guest is given the pages of running queues and
//! rings them without an exit; otherwise its doorbells are eventfds. A page keeps the device open: a lost device can be
//! reopened once the VMM has taken its pages from the guest.
//!
//! **Loss.** The kernel does not report that the process behind a device has exited, so the device is probed
//! periodically. A device that does not answer is closed, so that it can be removed, and reopened when a device of the
//! same name exists. VDUSE fails a device whose process does not answer within `/sys/class/vduse/NAME/msg_timeout`
//! seconds (30 by default); until then, another process can take over without loss.

mod device;
mod error;
mod follower;
mod identity;
mod kernel;
mod locking;
mod reach;
mod spec;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod vduse;

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use log::{debug, warn};
use vm_memory::GuestAddressSpace;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};
use vmm_sys_util::timerfd::TimerFd;

use super::{Ability, Attention, DoorbellPages, QueueRun, QueueRunner, RunnerError, RunnerQueue, StartError};
use crate::{GuestMap, Memory};
use device::Device;
pub use error::{VdpaError, VdpaFault};
use follower::Follower;
use kernel::{Character, Kernel};
pub use locking::Locking;
pub use spec::VdpaSpec;

/// The interval at which a running device is probed.
const PULSE: Duration = Duration::from_secs(5);

/// Opens a device.
type Opener = Box<dyn Fn(&Path) -> io::Result<Box<dyn Kernel>> + Send>;

/// A vDPA device.
pub struct Vdpa {
    spec: VdpaSpec,
    /// The memory that the device accesses, or will when it is back.
    memory: GuestMap,
    opener: Opener,
    ability: Ability,
    /// `None` while it is lost.
    device: Option<Device>,
    /// True if the device continues after a stop, or did so before it was lost.
    goes_on: bool,
    /// The number of queues that were started.
    running: Option<usize>,
    /// Signalled when the device's configuration changes.
    config_call: EventFd,
    /// Expires at the next probe of the device.
    timer: TimerFd,
    /// The time of the next probe.
    pulse: Instant,
    /// The number of failures to stop.
    stop_failures: u64,
    /// The doorbell pages that the guest has.
    doorbells: Option<Arc<DoorbellPages>>,
}

impl Vdpa {
    /// Opens the device, which resets it, and maps all of `memory` for it. May wait for the device as long as the
    /// kernel does.
    ///
    /// # Errors
    ///
    /// Fails with the remedy in one line; see [`VdpaFault`]. The device is closed then.
    pub fn open(spec: VdpaSpec, memory: &Memory) -> Result<Self, VdpaError> {
        Self::open_by(Box::new(Character::open), spec, memory)
    }

    fn open_by(opener: Opener, spec: VdpaSpec, memory: &Memory) -> Result<Self, VdpaError> {
        let memory = GuestMap::clone(&memory.memory());
        let opened = (|| {
            let kernel = opener(&spec.path).map_err(VdpaFault::opening)?;
            if let Some(complaint) = kernel.message_timeout().and_then(|timeout| timeout.complaint()) {
                warn!("vdpa={}: {complaint}", spec.path.display());
            }
            let (device, ability) = Device::open(kernel, &spec, &memory, |_| true)?;
            let request = |what| move |source| VdpaFault::Request { what, source };
            let config_call = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).map_err(request("get an eventfd"))?;
            let timer = TimerFd::new().map_err(|error| request("get a timer")(error.into()))?;
            Ok((device, ability, config_call, timer))
        })();
        let (device, ability, config_call, timer) =
            opened.map_err(|fault| VdpaError { path: spec.path.clone(), fault })?;
        let doorbells = (!device.doorbells().is_empty()).then(Arc::default);
        let goes_on = device.goes_on_after_stop();
        Ok(Self {
            spec,
            memory,
            opener,
            ability,
            device: Some(device),
            goes_on,
            running: None,
            config_call,
            timer,
            pulse: Instant::now(),
            stop_failures: 0,
            doorbells,
        })
    }

    /// Opens the device again.
    fn reopen(&self) -> Result<Device, VdpaFault> {
        let kernel = (self.opener)(&self.spec.path).map_err(VdpaFault::opening)?;
        // The driver has read the NIC's old address.
        let spec = VdpaSpec { mac: self.ability.mac, ..self.spec.clone() };
        let Ability { features, queue_size, mac, control_queue, .. } = self.ability;
        let suffices = |ability: &Ability| {
            let as_able = ability.features & features == features && ability.queue_size >= queue_size;
            as_able && (ability.mac, ability.control_queue) == (mac, control_queue)
        };
        Ok(Device::open(kernel, &spec, &self.memory, suffices)?.0)
    }

    fn set_pulse(&mut self) {
        self.pulse = Instant::now() + PULSE;
        // If that fails, only the device's own signals trigger a check.
        let _ = self.timer.reset(PULSE, None);
    }

    /// The report of the device, or the error that it is lost.
    fn listen(&mut self) -> Result<Attention, RunnerError> {
        // The device is checked whether or not it has sent a signal.
        let _ = self.config_call.read();
        let device = self.device.as_ref().ok_or_else(lost)?;
        if device.has_failed() {
            return Err(lost());
        }
        if device.follower().is_some_and(Follower::is_due) {
            return Ok(Attention::Restart);
        }
        if self.pulse <= Instant::now() {
            device.probe()?;
            self.set_pulse();
        }
        self.device.as_ref().ok_or_else(lost)?.attend()
    }

    /// Closes the device. The kernel stops whatever it was doing.
    fn close(&mut self) {
        self.take_doorbells();
        self.device = None;
    }

    /// Gives the guest the doorbell pages of `queues`, which run.
    fn give_doorbells(&self, queues: &[RunnerQueue]) {
        let (Some(doorbells), Some(device)) = (&self.doorbells, &self.device) else { return };
        let pages = queues.iter().filter_map(|queue| {
            let page = device.doorbells().get(usize::from(queue.index))?;
            // Earlier doorbells were not forwarded. The write also faults the page in: a guest that reads a page that
            // was never written to stops its vCPU permanently.
            page.ring(queue.index);
            Some((queue.index, Arc::clone(page)))
        });
        doorbells.set(pages);
    }

    /// Takes all doorbell pages away from the guest.
    fn take_doorbells(&self) {
        if let Some(doorbells) = &self.doorbells {
            doorbells.set([]);
        }
    }
}

impl QueueRunner for Vdpa {
    fn ability(&self) -> Ability {
        self.ability.clone()
    }

    fn start(&mut self, run: &QueueRun<'_>) -> Result<(), StartError> {
        let device = self.device.as_mut().ok_or_else(lost)?;
        if let Err(error) = device.start(run, &self.config_call) {
            if device.reset().is_err() || device.has_failed() {
                self.close();
            }
            return Err(error);
        }
        self.running = Some(run.queues.len());
        self.give_doorbells(run.queues);
        self.set_pulse();
        Ok(())
    }

    fn stop(&mut self) -> Vec<Option<u16>> {
        let queues = self.running.take().unwrap_or(0);
        self.take_doorbells();
        if let Some(device) = &mut self.device
            && let Err(error) = device.stop()
        {
            self.stop_failures += 1;
            // Logged at powers of two, so that a driver cannot fill the log.
            if self.stop_failures.is_power_of_two() {
                let (name, times) = (&self.ability.name, self.stop_failures);
                warn!(
                    "{name}: the device does not stop ({times} so far): {error}; it is closed, and opened \
                     again when it is needed"
                );
            }
            self.close();
        }
        vec![None; queues]
    }

    fn goes_on_after_stop(&self) -> bool {
        self.goes_on
    }

    fn set_call(&mut self, queue: u16, call: &EventFd) -> Result<(), RunnerError> {
        self.device.as_ref().ok_or_else(lost)?.set_call(queue, call)
    }

    /// A device with several pairs has a control queue, which takes the command itself.
    fn set_active_pairs(&mut self, _pairs: u16) -> Result<(), RunnerError> {
        Ok(())
    }

    fn set_memory(&mut self, memory: &GuestMap) -> Result<(), RunnerError> {
        if let Some(device) = &mut self.device
            && let Err(error) = device.set_memory(memory)
        {
            if !error.is_as_before {
                self.close();
            }
            let what = "have the device reach the guest's new memory";
            return Err(RunnerError { what, source: io::Error::other(error.fault) });
        }
        self.memory = memory.clone();
        Ok(())
    }

    fn doorbell_pages(&self) -> Option<Arc<DoorbellPages>> {
        self.doorbells.clone()
    }

    fn watched(&self) -> Vec<BorrowedFd<'_>> {
        let watched: &[RawFd] = match self.running {
            Some(_) if self.device.is_some() => &[self.config_call.as_raw_fd(), self.timer.as_raw_fd()],
            _ => &[],
        };
        let follower = self.device.as_ref().filter(|_| self.running.is_some()).and_then(Device::follower);
        // SAFETY: both are open as long as they are borrowed.
        let watched = watched.iter().map(|fd| unsafe { BorrowedFd::borrow_raw(*fd) });
        watched.chain(follower.map(Follower::watched)).collect()
    }

    fn attend(&mut self) -> Result<Attention, RunnerError> {
        if self.running.is_none() {
            return Ok(Attention::Nothing);
        }
        self.listen().inspect_err(|_| self.close())
    }

    fn recover(&mut self) -> Result<(), RunnerError> {
        if self.device.is_none() {
            let device = self.reopen().inspect_err(|fault| debug!("vdpa={}: {fault}", self.ability.name));
            let device =
                device.map_err(|fault| RunnerError { what: "open the device", source: io::Error::other(fault) })?;
            self.goes_on = device.goes_on_after_stop();
            self.device = Some(device);
        }
        Ok(())
    }
}

fn lost() -> RunnerError {
    RunnerError { what: "reach the device", source: io::ErrorKind::NotConnected.into() }
}
