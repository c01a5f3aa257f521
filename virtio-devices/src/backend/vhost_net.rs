//! vhost-net: the host's kernel moves frames between the queues and a tap.
//!
//! The kernel takes doorbells and signals interrupts through eventfds, so no thread of this process touches a frame.
//! The kernel has no control queue: receive filters are best effort (`virtio 1.4 §5.1.6.5.1`), and the driver gets
//! every frame of the tap.
//!
//! Each queue pair has a vhost device of its own, which is open while the queues run, and until the worker that has
//! stopped them has closed it. A function without a driver has no kernel threads.
//!
//! The kernel does not report that the tap was deleted, so the tap is polled. (Its descriptor would become readable,
//! but that happens for every frame, too.) A new tap of the same name replaces a deleted one.
//!
//! **Behind an IOMMU** the kernel asks for translations and caches them. This program also sends each mapping when it
//! is made, before the kernel asks, and invalidates removed mappings before the driver gets its answer. A queue whose
//! driver used an address that is not mapped waits for an answer that never comes; its device is stopped then, and the
//! driver is asked for a reset.

mod device;
mod error;
mod follower;
mod iotlb;

use std::any::Any;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use vhost::VhostBackend;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};
use vmm_sys_util::timerfd::TimerFd;

use super::vhost_common::io_error;
use super::{
    Ability, Attention, BackendKind, LOG, QueueRun, QueueRunner, RunnerError, SharedLog, StartError, Tap, TapError,
};
use crate::GuestMap;
use crate::frames::net_protocol::features::{offload_features, served_for_any};
use crate::frames::net_protocol::{MAX_QUEUE_SIZE, Offloads};
use crate::memory::{DmaFollower, Translate};
use crate::os::eventfd::borrow;
pub use device::VhostKernel;
use device::{Device, QUEUES_PER_DEVICE, regions};
pub use error::VhostNetError;
use follower::Kernels;

/// The most misses of the kernel that are answered per call. The rest is answered in the next.
const QUESTIONS: usize = 64;
/// The interval at which the tap of running queues is checked.
const PULSE: Duration = Duration::from_secs(2);

/// A tap whose frames the kernel moves.
pub struct VhostNet {
    tap: Tap,
    kernel: VhostKernel,
    devices: Vec<Device>,
    /// The stopped devices. The kernel waits for a grace period of RCU, some milliseconds, when one is closed.
    stopped: Vec<Device>,
    /// The IOMMU and its follower, for a function behind an IOMMU while its queues run.
    translated: Option<(Arc<dyn Translate>, Arc<Kernels>)>,
    /// The dirty log for the kernel's writes to guest memory.
    log: Option<Arc<SharedLog>>,
    /// Signals while queues run.
    signals: Option<Signals>,
}

/// The events about running queues.
struct Signals {
    /// Signalled when the kernel finds rings invalid.
    broken: EventFd,
    /// Expires when it is time to look at the tap.
    timer: TimerFd,
}

impl VhostNet {
    /// Makes `kernel` move the frames of `tap`.
    pub fn new(tap: Tap, kernel: VhostKernel) -> Self {
        Self { tap, kernel, devices: Vec::new(), stopped: Vec::new(), translated: None, log: None, signals: None }
    }

    /// Starts all pairs, or none.
    fn start_all(&mut self, run: &QueueRun<'_>) -> Result<(), StartError> {
        // The tap may have been deleted while there was no driver.
        self.recover()?;
        self.signals = Some(Signals::new()?);
        let memory = Arc::new(run.memory.clone());
        let mut pairs: Vec<_> = run.queues.iter().map(|queue| queue.index / QUEUES_PER_DEVICE).collect();
        pairs.dedup();
        for pair in pairs {
            let broken = self.signals.as_ref().map(|signals| &signals.broken);
            let device = Device::start(pair, self.kernel, run, &memory, (broken, self.log.as_deref()));
            self.devices.push(device?);
        }
        if let Some(iommu) = run.dma.iommu() {
            let kernels = Kernels::new(self.devices.iter().map(|device| Arc::clone(&device.net)).collect(), &memory);
            self.translated = Some((Arc::clone(iommu), kernels));
            self.follow();
        }
        if let Some(first) = self.tap.queues().first() {
            let first = first.lock();
            // A tap that refuses both was deleted, and delivers nothing.
            let _ = first.set_offloads(run.offloads).or_else(|_| first.set_offloads(Offloads::empty()));
        }
        if run.fresh {
            for queue in self.tap.queues() {
                queue.lock().discard_stale();
            }
        }
        Ok(self.activate(run.active_pairs)?)
    }

    /// Sends the function's mappings to the kernel, and from now on their changes.
    fn follow(&self) {
        let Some((iommu, kernels)) = &self.translated else { return };
        // The kernel asks for translations that it lacks, so that nothing fails.
        let _ = iommu.follow(Some(Arc::clone(kernels) as Arc<dyn DmaFollower>));
        self.devices.iter().for_each(|device| device.preload(kernels, &**iommu));
    }

    /// Answers the kernel's misses. Returns true if it asked for an address that the function cannot access.
    fn answer(&self) -> io::Result<bool> {
        let Some((iommu, kernels)) = &self.translated else { return Ok(false) };
        for device in &self.devices {
            let Some(fd) = device.asks() else { continue };
            for _ in 0..QUESTIONS {
                let Some(miss) = device.miss()? else { break };
                if !kernels.answer(fd, miss, &**iommu) {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Attaches the tap's queues of the first `pairs` pairs to the kernel's devices, and detaches the others.
    fn activate(&mut self, pairs: u16) -> Result<(), RunnerError> {
        for device in &mut self.devices {
            let Some(queue) = self.tap.queues().get(usize::from(device.pair)) else { continue };
            let mut queue = queue.lock();
            let wanted = device.pair < pairs;
            if wanted == device.active {
                continue;
            }
            if wanted {
                queue.set_attached(true).map_err(RunnerError::of("attach a queue of the tap"))?;
            }
            let what = "give vhost-net a queue of the tap";
            let file = wanted.then(|| queue.as_fd().try_clone_to_owned().map(File::from));
            let file = file.transpose().map_err(RunnerError::of(what))?;
            device.set_backend(file.as_ref()).map_err(|error| RunnerError::of(what)(io_error(error)))?;
            device.active = wanted;
            // The first queue stays attached, so that the tap keeps its carrier.
            if !wanted && device.pair > 0 {
                queue.set_attached(false).map_err(RunnerError::of("detach a queue of the tap"))?;
            }
        }
        Ok(())
    }
}

impl QueueRunner for VhostNet {
    fn ability(&self) -> Ability {
        Ability {
            kind: BackendKind::VhostNet,
            name: self.tap.name().to_owned(),
            features: self.kernel.known | offload_features(self.tap.offloads()) | served_for_any(),
            queue_pairs: u16::try_from(self.tap.queues().len()).unwrap_or(u16::MAX),
            queue_size: MAX_QUEUE_SIZE,
            mac: None,
            mtu: self.tap.mtu(),
            control_queue: false,
            switches_offloads: true,
            logs_writes: self.kernel.logs_writes(),
            has_state: false,
        }
    }

    fn announce(&mut self, _mac: [u8; 6], frames: &[Vec<u8>]) -> Result<(), RunnerError> {
        self.tap.queues().first().into_iter().for_each(|queue| queue.lock().announce(frames));
        Ok(())
    }

    fn start(&mut self, run: &QueueRun<'_>) -> Result<(), StartError> {
        self.start_all(run).inspect_err(|_| {
            self.stop();
            self.stopped.clear();
        })
    }

    fn stop(&mut self) -> Vec<Option<u16>> {
        // A refusal must not keep other pairs running, and ends below with the device at the latest.
        for device in &self.devices {
            device.stop();
        }
        let _ = self.activate(0);
        if let Some((iommu, _)) = self.translated.take() {
            let _ = iommu.follow(None);
        }
        let mut positions = Vec::new();
        for device in self.devices.drain(..) {
            // The kernel keeps 16 bits of it in the lower half.
            positions.extend(device.indices().map(|index| Some(device.net.get_vring_base(index).ok()? as u16)));
            self.stopped.push(device);
        }
        self.signals = None;
        positions
    }

    fn take_stopped(&mut self) -> Option<Box<dyn Any>> {
        (!self.stopped.is_empty()).then(|| Box::new(std::mem::take(&mut self.stopped)) as Box<dyn Any>)
    }

    fn set_call(&mut self, queue: u16, call: &EventFd) -> Result<(), RunnerError> {
        let device = self.devices.iter().find(|device| device.pair == queue / QUEUES_PER_DEVICE);
        device.map_or(Ok(()), |device| {
            let set = device.net.set_vring_call((queue % QUEUES_PER_DEVICE).into(), call);
            set.map_err(|error| RunnerError::of("change an interrupt of vhost-net")(io_error(error)))
        })
    }

    fn set_active_pairs(&mut self, pairs: u16) -> Result<(), RunnerError> {
        self.activate(pairs)
    }

    fn set_offloads(&self, offloads: Offloads) -> io::Result<()> {
        let first = self.tap.queues().first().ok_or(io::ErrorKind::NotFound)?;
        first.lock().set_offloads(offloads)
    }

    fn set_memory(&mut self, memory: &GuestMap) -> Result<(), RunnerError> {
        let table = |memory| regions(memory).map_err(io_error);
        let failed = || RunnerError::of("give vhost-net the guest's memory");
        let new = table(memory).map_err(failed())?;
        let mut devices = self.devices.iter();
        let set = devices.try_for_each(|device| device.net.set_mem_table(&new).map(drop));
        if let Err(error) = set {
            for device in &self.devices {
                // A table that the kernel had cannot be too large. If it fails, the old memory is still in the new
                // table, or no queue uses it.
                let _ = table(&device.memory).map(|old| device.net.set_mem_table(&old));
            }
            return Err(failed()(io_error(error)));
        }
        self.devices.iter_mut().for_each(|device| device.memory = memory.clone());
        if let Some((_, kernels)) = &self.translated {
            kernels.set_memory(memory);
            self.follow();
        }
        Ok(())
    }

    fn set_log(&mut self, log: Option<&Arc<SharedLog>>) -> Result<(), RunnerError> {
        self.log = None;
        // Every log is ended before a new one begins: a device may have another log.
        let ended = self.devices.iter().try_for_each(Device::end_log);
        let begun = log.map_or(Ok(()), |log| self.devices.iter().try_for_each(|device| device.begin_log(log)));
        let done = ended.and(begun).inspect_err(|_| {
            let _ = self.devices.iter().try_for_each(Device::end_log);
        });
        // The kernel has forgotten all translations, and would ask for each.
        self.follow();
        done.map_err(|error| RunnerError::of(LOG)(io_error(error)))?;
        self.log = log.cloned();
        Ok(())
    }

    fn watched(&self) -> Vec<BorrowedFd<'_>> {
        let Some(Signals { broken, timer }) = &self.signals else { return Vec::new() };
        // SAFETY: the timer is open as long as it is borrowed.
        let timer = unsafe { BorrowedFd::borrow_raw(timer.as_raw_fd()) };
        [borrow(broken), timer].into_iter().chain(self.devices.iter().filter_map(Device::asks)).collect()
    }

    fn attend(&mut self) -> Result<Attention, RunnerError> {
        if let Some(Signals { timer, .. }) = &mut self.signals {
            // If that fails, the tap is checked at the next event.
            let _ = timer.reset(PULSE, None);
        }
        if self.tap.is_gone() {
            return Err(RunnerError::of("continue")(io::Error::other(TapError::Gone(self.tap.name().into()))));
        }
        if self.answer().map_err(RunnerError::of("read what vhost-net asks"))? {
            return Ok(Attention::Unreachable);
        }
        let broken = self.signals.as_ref().is_some_and(|signals| signals.broken.read().is_ok());
        Ok(if broken { Attention::BrokenRing } else { Attention::Nothing })
    }

    /// The kernel is always there; only a deleted tap has to be reopened.
    fn recover(&mut self) -> Result<(), RunnerError> {
        if self.tap.is_gone() {
            let again = self.tap.reopen();
            let again = again.map_err(|error| RunnerError::of("open the tap again")(io::Error::other(error)))?;
            self.tap = self.tap.replaced_by(again);
        }
        Ok(())
    }
}

impl Drop for VhostNet {
    fn drop(&mut self) {
        drop(self.stop());
    }
}

impl Signals {
    fn new() -> Result<Self, RunnerError> {
        let broken = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).map_err(RunnerError::of("get an eventfd"))?;
        let timer = TimerFd::new().map_err(RunnerError::of("get a timer"))?;
        Ok(Self { broken, timer })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tap_that_is_gone_is_a_loss_and_none_is_made_in_its_place() {
        let (near, far) = crate::net::testing::sockets();
        let mut net = VhostNet::new(Tap::over_sockets(vec![near]), VhostKernel { known: 1 << 32 });
        assert_eq!(net.attend().unwrap(), Attention::Nothing);
        net.recover().unwrap();
        drop(far);
        assert!(net.attend().unwrap_err().to_string().starts_with("cannot continue: sockets was deleted"));
        assert!(net.recover().unwrap_err().to_string().starts_with("cannot open the tap again: sockets was deleted"));
    }
}
