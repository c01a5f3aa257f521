//! A vDPA device of the host, by `/dev/vhost-vdpa-N`.
//!
//! The device runs the queues, whatever it is: a part of a network card, or a process of the host's (VDUSE). It takes doorbells from
//! eventfds and signals interrupts by eventfds.
//!
//! A device is opened, owned and given all of the guest's memory when its NIC is plugged in, and stays so: what a guest does, enabling and
//! disabling its function, resetting it, restarting, changes nothing of what the device reaches. That holds if a reset of the device
//! keeps its mappings:
//!
//! - A driver that used to forget them at a reset offers since Linux 6.7 not to (`VHOST_BACKEND_F_IOTLB_PERSIST`), and keeps
//!   them if that is accepted, which it is here.
//! - Since then, one that does not offer it has never forgotten any: VDUSE.
//! - Before 6.7 nobody can tell. The device is given the memory again, in one batch, before it runs for the first time after a reset.
//!
//! A device with a control queue runs that, too, if its number of pairs is the NIC's or the NIC has one. One without is given commands
//! only if it has no address of its own: else it filters frames by its address, and would not hear of another one.
//!
//! Queues go on where their used ring ends, since a device that was reset has forgotten the buffers that it held. One that can be suspended
//! and resumed is not reset by a pause, and keeps what its control queue has brought about. One that can neither be resumed nor take a queue's
//! position, as virtio devices behind the driver vp_vdpa (`virtio 1.4` has no such register), does not go on after a pause, and its driver is asked to
//! reset the NIC. So is one whose own control queue was given commands before the device was reset or lost: nobody else knows these. While
//! the host has taken the link down, the queues of the former and of all that have a control queue run on: a driver waits for the answer
//! to a command, however long that takes.
//!
//! A device may have a page for each queue's doorbell, and nothing else there. The guest is given those of queues that run, and rings them
//! without leaving itself; until then, and after that, its doorbells are eventfds as with any other backend. A page keeps the device
//! open: one that is lost can be opened again once the machine has taken the pages from the guest.
//!
//! Nobody tells when a process that runs a device is gone: it is asked for a sign of life now and then. If none comes, the device is closed,
//! so that it can be removed, and it is opened again once there is one under its name. VDUSE gives up a device whose process does not
//! answer within `/sys/class/vduse/NAME/msg_timeout` seconds (30); before that, another process may take the device over, and nothing is
//! lost.

mod device;
mod error;
mod identity;
mod kernel;
mod mapping;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod vduse;

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use log::{debug, warn};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};
use vmm_sys_util::timerfd::TimerFd;

use super::{Ability, Attention, Backend, DoorbellPages, Offload, OffloadError, OffloadQueue, OffloadRun, StartError};
use crate::Memory;
use device::Device;
pub use error::{VdpaError, VdpaFault};
use kernel::{Character, Kernel};
pub use mapping::Locking;

/// How often a device that runs is asked for a sign of life.
const PULSE: Duration = Duration::from_secs(5);

/// Which vDPA device to use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VdpaSpec {
    /// Its path, `/dev/vhost-vdpa-N`.
    pub path: PathBuf,
    /// The Ethernet address that it shall have. Without one, its own.
    pub mac: Option<[u8; 6]>,
    /// The pairs of queues that it shall run.
    pub queue_pairs: u16,
}

/// Opens a device.
type Opener = Box<dyn Fn(&Path) -> io::Result<Box<dyn Kernel>> + Send>;

/// A vDPA device.
pub struct Vdpa {
    spec: VdpaSpec,
    memory: Memory,
    opener: Opener,
    ability: Ability,
    /// `None` while it is lost.
    device: Option<Device>,
    /// How many queues were started.
    running: Option<usize>,
    /// Signalled when the device's configuration changes.
    config_call: EventFd,
    /// Expires when it is time for a sign of life.
    timer: TimerFd,
    /// When that is.
    pulse: Instant,
    /// How often it did not stop.
    stop_failures: u64,
    /// What the guest may ring by itself.
    doorbells: Option<Arc<DoorbellPages>>,
}

impl Vdpa {
    /// Opens the device, which resets it, and lets it reach all of `memory`. May wait for it as long as the kernel does.
    ///
    /// # Errors
    ///
    /// One line that says what to do; see [`VdpaFault`]. The device is closed then.
    pub fn open(spec: VdpaSpec, memory: &Memory) -> Result<Self, VdpaError> {
        Self::open_by(Box::new(Character::open), spec, memory)
    }

    fn open_by(opener: Opener, spec: VdpaSpec, memory: &Memory) -> Result<Self, VdpaError> {
        let opened = (|| {
            let kernel = opener(&spec.path).map_err(VdpaFault::opening)?;
            if let Some(complaint) = kernel.message_timeout().and_then(|timeout| timeout.complaint()) {
                warn!("vdpa={}: {complaint}", spec.path.display());
            }
            let (device, ability) = Device::open(kernel, &spec, memory, |_| true)?;
            let request = |what| move |source| VdpaFault::Request { what, source };
            let config_call = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).map_err(request("get an eventfd"))?;
            let timer = TimerFd::new().map_err(|error| request("get a timer")(error.into()))?;
            Ok((device, ability, config_call, timer))
        })();
        let (device, ability, config_call, timer) =
            opened.map_err(|fault| VdpaError { path: spec.path.clone(), fault })?;
        let doorbells = (!device.doorbells().is_empty()).then(Arc::default);
        Ok(Self {
            spec,
            memory: memory.clone(),
            opener,
            ability,
            device: Some(device),
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
        // The driver knows the NIC by the address that it had.
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
        // Without a timer, the device's own messages are what is left.
        let _ = self.timer.reset(PULSE, None);
    }

    /// What the device says, or that it is lost.
    fn listen(&mut self) -> Result<Attention, OffloadError> {
        // What it was signalled for is looked at in any case.
        let _ = self.config_call.read();
        let device = self.device.as_ref().ok_or_else(lost)?;
        if self.pulse <= Instant::now() {
            device.probe()?;
            self.set_pulse();
        }
        self.device.as_ref().ok_or_else(lost)?.attend()
    }

    /// Closes the device, whatever it was doing: the kernel ends that, and what it reaches is no more than before.
    fn close(&mut self) {
        self.take_doorbells();
        self.device = None;
    }

    /// Lets the guest ring the doorbells of `queues`, which run, by itself.
    fn give_doorbells(&self, queues: &[OffloadQueue]) {
        let (Some(doorbells), Some(device)) = (&self.doorbells, &self.device) else { return };
        let pages = queues.iter().filter_map(|queue| {
            let page = device.doorbells().get(usize::from(queue.index))?;
            // What was rung until now has come to nobody. It also makes the page one that the kernel lets a guest read: a guest that
            // reads one that has never been written to stops its vCPU for good.
            page.ring(queue.index);
            Some((queue.index, Arc::clone(page)))
        });
        doorbells.set(pages);
    }

    /// Lets it ring none.
    fn take_doorbells(&self) {
        if let Some(doorbells) = &self.doorbells {
            doorbells.set([]);
        }
    }
}

impl Offload for Vdpa {
    fn ability(&self) -> Ability {
        self.ability.clone()
    }

    fn start(&mut self, run: &OffloadRun<'_>) -> Result<(), StartError> {
        let device = self.device.as_mut().ok_or_else(lost)?;
        if let Err(error) = device.start(run, &self.config_call) {
            if device.reset().is_err() {
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
            // A driver can stop it as often as it likes; the log grows with the logarithm of that.
            if self.stop_failures.is_power_of_two() {
                let (name, times) = (&self.ability.name, self.stop_failures);
                warn!(
                    "{name}: the device does not stop ({times} times so far): {error}; it is closed, and opened again when it is needed"
                );
            }
            self.close();
        }
        vec![None; queues]
    }

    fn goes_on_after_stop(&self) -> bool {
        // One that is lost has been stopped.
        self.device.as_ref().is_none_or(Device::goes_on_after_stop)
    }

    fn set_call(&mut self, queue: u16, call: &EventFd) -> Result<(), OffloadError> {
        self.device.as_ref().ok_or_else(lost)?.set_call(queue, call)
    }

    /// A device of several pairs has a control queue, by which its driver chooses.
    fn set_active_pairs(&mut self, _pairs: u16) -> Result<(), OffloadError> {
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
        // SAFETY: both are open as long as they are borrowed.
        watched.iter().map(|fd| unsafe { BorrowedFd::borrow_raw(*fd) }).collect()
    }

    fn attend(&mut self) -> Result<Attention, OffloadError> {
        if self.running.is_none() {
            return Ok(Attention::Nothing);
        }
        self.listen().inspect_err(|_| self.close())
    }

    fn recover(&mut self) -> Result<(), OffloadError> {
        if self.device.is_none() {
            let device = self.reopen().inspect_err(|fault| debug!("vdpa={}: {fault}", self.ability.name));
            self.device = Some(
                device.map_err(|fault| OffloadError { what: "open the device", source: io::Error::other(fault) })?,
            );
        }
        Ok(())
    }
}

impl From<Vdpa> for Backend {
    fn from(vdpa: Vdpa) -> Self {
        Self::Offload(Box::new(vdpa))
    }
}

fn lost() -> OffloadError {
    OffloadError { what: "reach the device", source: io::ErrorKind::NotConnected.into() }
}
