//! vhost-net: the host's kernel moves frames between the queues and a tap.
//!
//! The kernel takes doorbells and signals interrupts through eventfds, so no thread of this process touches a frame.
//! The kernel has no control queue: receive filters are best effort (`virtio 1.4 §5.1.6.5.1`), and the driver gets
//! every frame of the tap.
//!
//! Each queue pair has a vhost device of its own, which is open only while the queues run. A function without a driver
//! has no kernel threads.
//!
//! The kernel does not report that the tap was deleted, so the tap is polled. (Its descriptor would become readable,
//! but it also does so for every frame.) A new tap of the same name replaces a deleted one.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;
use vhost::net::VhostNet as _;
use vhost::vhost_kern::VhostKernBackend;
use vhost::vhost_kern::net::Net;
use vhost::vhost_kern::vhost_binding::VHOST_SET_VRING_ADDR;
use vhost::{Error as VhostError, VhostBackend, VhostUserMemoryRegionInfo};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, MemoryRegionAddress};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};
use vmm_sys_util::ioctl::ioctl_with_ref;
use vmm_sys_util::timerfd::TimerFd;

use super::vhost_common::{io_error, rings};
use super::{
    Ability, Attention, BackendKind, QueueRun, QueueRunner, RunnerError, RunnerQueue, StartError, Tap, TapError,
};
use crate::ErrorKind;
use crate::eventfd::borrow;
use crate::features::has;
use crate::net_protocol::features::{offload_features, served_for_any};
use crate::net_protocol::{MAX_QUEUE_SIZE, Offloads};

/// The kernel's own index of a pair's queue: receive, transmit.
const QUEUES_PER_DEVICE: u16 = 2;
/// How often a tap whose queues run is looked at.
const PULSE: Duration = Duration::from_secs(2);

/// Why vhost-net cannot be used: one line, to follow the option's name and value.
#[derive(Debug, Error)]
pub enum VhostNetError {
    /// There is no such device.
    #[error("there is no /dev/vhost-net; load the module (modprobe vhost_net), or leave vhost out")]
    Missing,
    /// This user may not use it.
    #[error("no permission to open /dev/vhost-net; give this user read and write access to it, or leave vhost out")]
    NoRight,
    /// Something else is wrong with it.
    #[error("cannot use /dev/vhost-net: {0}")]
    Device(io::Error),
    /// The kernel is too old.
    #[error("this kernel's vhost-net does not support virtio 1; leave vhost out")]
    Legacy,
}

impl VhostNetError {
    /// Who has to act on it.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::NoRight => ErrorKind::Denied,
            Self::Missing | Self::Device(_) | Self::Legacy => ErrorKind::Host,
        }
    }
}

/// The kernel's vhost-net.
#[derive(Debug, Clone, Copy)]
pub struct VhostKernel {
    /// The feature bits that it knows.
    known: u64,
}

impl VhostKernel {
    /// Finds out what the kernel can do.
    ///
    /// # Errors
    ///
    /// When there is no vhost-net, or not for this user.
    pub fn ask() -> Result<Self, VhostNetError> {
        let net = Net::new(Arc::new(GuestMemoryMmap::<()>::new())).map_err(|error| unusable(io_error(error)))?;
        let known = net.get_features().map_err(|error| VhostNetError::Device(io_error(error)))?;
        if has(known, VIRTIO_F_VERSION_1) { Ok(Self { known }) } else { Err(VhostNetError::Legacy) }
    }
}

/// A tap whose frames the kernel carries.
pub struct VhostNet {
    tap: Tap,
    kernel: VhostKernel,
    devices: Vec<Device>,
    /// Signals while queues run.
    signals: Option<Signals>,
}

/// What reports on running queues.
struct Signals {
    /// Signalled when the kernel finds rings invalid.
    broken: EventFd,
    /// Expires when it is time to look at the tap.
    timer: TimerFd,
}

/// What serves one pair.
struct Device {
    pair: u16,
    net: Net<Arc<GuestMemoryMmap>>,
    /// What the kernel reaches, kept mapped.
    memory: GuestMemoryMmap,
    /// The pair's queues that the driver enabled, by the kernel's index.
    queues: Vec<u16>,
    active: bool,
}

impl VhostNet {
    /// Has `kernel` carry the frames of `tap`.
    pub fn new(tap: Tap, kernel: VhostKernel) -> Self {
        Self { tap, kernel, devices: Vec::new(), signals: None }
    }

    fn start_device(&self, pair: u16, run: &QueueRun<'_>, memory: &Arc<GuestMemoryMmap>) -> Result<Device, StartError> {
        let lost = |error| StartError::Lost(RunnerError::of("set up vhost-net")(io_error(error)));
        let net = Net::new(Arc::clone(memory)).map_err(lost)?;
        net.set_owner().map_err(lost)?;
        net.set_features(run.features & self.kernel.known).map_err(lost)?;
        net.set_mem_table(&regions(memory).map_err(lost)?).map_err(lost)?;
        let mut queues = Vec::with_capacity(QUEUES_PER_DEVICE.into());
        for queue in run.queues.iter().filter(|queue| queue.index / QUEUES_PER_DEVICE == pair) {
            let index = queue.index % QUEUES_PER_DEVICE;
            place(&net, index.into(), queue).map_err(refused)?;
            self.connect(&net, index.into(), queue).map_err(lost)?;
            queues.push(index);
        }
        Ok(Device { pair, net, memory: GuestMemoryMmap::clone(memory), queues, active: false })
    }

    /// Gives the kernel the eventfds of `queue`.
    fn connect(&self, net: &Net<Arc<GuestMemoryMmap>>, index: usize, queue: &RunnerQueue) -> vhost::Result<()> {
        net.set_vring_kick(index, &queue.kick)?;
        net.set_vring_call(index, &queue.call)?;
        self.signals.as_ref().map_or(Ok(()), |signals| net.set_vring_err(index, &signals.broken))
    }

    /// Starts all pairs, or none.
    fn start_all(&mut self, run: &QueueRun<'_>) -> Result<(), StartError> {
        // It may have been deleted while there was no driver.
        self.recover()?;
        self.signals = Some(Signals::new()?);
        let memory = Arc::new(run.memory.clone());
        let mut pairs: Vec<_> = run.queues.iter().map(|queue| queue.index / QUEUES_PER_DEVICE).collect();
        pairs.dedup();
        for pair in pairs {
            let device = self.start_device(pair, run, &memory);
            self.devices.push(device?);
        }
        if let Some(first) = self.tap.queues().first() {
            let first = first.lock();
            // A tap that refuses both is gone, and delivers nothing.
            let _ = first.set_offloads(run.offloads).or_else(|_| first.set_offloads(Offloads::empty()));
        }
        if run.fresh {
            for queue in self.tap.queues() {
                queue.lock().discard_stale();
            }
        }
        Ok(self.activate(run.active_pairs)?)
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
            for index in &device.queues {
                let given = device.net.set_backend((*index).into(), file.as_ref());
                given.map_err(|error| RunnerError::of(what)(io_error(error)))?;
            }
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
        }
    }

    fn start(&mut self, run: &QueueRun<'_>) -> Result<(), StartError> {
        self.start_all(run).inspect_err(|_| drop(self.stop()))
    }

    fn stop(&mut self) -> Vec<Option<u16>> {
        // A refusal must not keep other pairs running, and ends below with the device at the latest.
        for device in &self.devices {
            device.queues.iter().for_each(|index| drop(device.net.set_backend((*index).into(), None)));
        }
        let _ = self.activate(0);
        let mut positions = Vec::new();
        for device in self.devices.drain(..) {
            // The kernel keeps 16 bits of it in the lower half.
            positions.extend(
                device.queues.iter().map(|index| Some(device.net.get_vring_base((*index).into()).ok()? as u16)),
            );
        }
        self.signals = None;
        positions
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

    fn set_memory(&mut self, memory: &GuestMemoryMmap) -> Result<(), RunnerError> {
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
        Ok(())
    }

    fn watched(&self) -> Vec<BorrowedFd<'_>> {
        let Some(Signals { broken, timer }) = &self.signals else { return Vec::new() };
        // SAFETY: the timer is open as long as it is borrowed.
        let timer = unsafe { BorrowedFd::borrow_raw(timer.as_raw_fd()) };
        vec![borrow(broken), timer]
    }

    fn attend(&mut self) -> Result<Attention, RunnerError> {
        if let Some(Signals { timer, .. }) = &mut self.signals {
            // Restarted. If that fails, the tap is checked at the next event.
            let _ = timer.reset(PULSE, None);
        }
        if self.tap.is_gone() {
            return Err(RunnerError::of("go on")(io::Error::other(TapError::Gone(self.tap.name().into()))));
        }
        let broken = self.signals.as_ref().is_some_and(|signals| signals.broken.read().is_ok());
        Ok(if broken { Attention::BrokenRing } else { Attention::Nothing })
    }

    /// The kernel is always there; only a tap that was deleted has to be reopened.
    fn recover(&mut self) -> Result<(), RunnerError> {
        if self.tap.is_gone() {
            let again = self.tap.reopen();
            self.tap = again.map_err(|error| RunnerError::of("open the tap again")(io::Error::other(error)))?;
        }
        Ok(())
    }
}

impl Signals {
    fn new() -> Result<Self, RunnerError> {
        let broken = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).map_err(RunnerError::of("get an eventfd"))?;
        let timer = TimerFd::new().map_err(RunnerError::of("get a timer"))?;
        Ok(Self { broken, timer })
    }
}

/// Tells the kernel the rings of `queue` and its position.
fn place(net: &Net<Arc<GuestMemoryMmap>>, index: usize, queue: &RunnerQueue) -> vhost::Result<()> {
    net.set_vring_num(index, queue.size)?;
    set_rings(net, index, queue)?;
    net.set_vring_base(index, queue.position)
}

/// Why the kernel refuses a queue: `EINVAL` and `EFAULT` mean invalid rings.
fn refused(error: vhost::Error) -> StartError {
    let error = RunnerError::of("set up a queue of vhost-net")(io_error(error));
    match error.source.raw_os_error() {
        Some(libc::EINVAL | libc::EFAULT) => StartError::Refused(error),
        _ => StartError::Lost(error),
    }
}

/// As the method of the same purpose in `vhost`, which refuses rings that end where a region of guest memory does. That
/// they lie in it has been checked, and the kernel checks it again.
fn set_rings(net: &Net<Arc<GuestMemoryMmap>>, index: usize, queue: &RunnerQueue) -> vhost::Result<()> {
    let rings = rings(queue).to_vhost_vring_addr(index, net.mem())?;
    // SAFETY: the kernel reads one structure of this type.
    let set = unsafe { ioctl_with_ref(net, VHOST_SET_VRING_ADDR(), &rings) };
    if set < 0 { Err(VhostError::IoctlError(io::Error::last_os_error())) } else { Ok(()) }
}

fn regions(memory: &GuestMemoryMmap) -> vhost::Result<Vec<VhostUserMemoryRegionInfo>> {
    let region = |region: &<GuestMemoryMmap as GuestMemoryBackend>::R| {
        let address = region.get_host_address(MemoryRegionAddress(0));
        let address = address.map_err(|_| vhost::Error::InvalidGuestMemory)?;
        Ok(VhostUserMemoryRegionInfo {
            guest_phys_addr: region.start_addr().raw_value(),
            memory_size: region.len(),
            userspace_addr: address as u64,
            mmap_offset: 0,
            mmap_handle: -1,
        })
    };
    memory.iter().map(region).collect()
}

fn unusable(error: io::Error) -> VhostNetError {
    match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => VhostNetError::Missing,
        Some(libc::EACCES | libc::EPERM) => VhostNetError::NoRight,
        _ => VhostNetError::Device(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vhost_net_that_is_missing_or_closed_to_us_is_told_apart() {
        let told = |errno| unusable(io::Error::from_raw_os_error(errno)).to_string();
        assert!(told(libc::ENOENT).contains("modprobe vhost_net"));
        assert!(told(libc::EACCES).contains("no permission"));
        assert!(told(libc::EMFILE).contains("Too many open files"));
    }

    #[test]
    fn a_tap_that_is_gone_is_a_loss_and_none_is_made_in_its_place() {
        let (near, far) = crate::net::testing::sockets();
        let mut net = VhostNet::new(Tap::over_sockets(vec![near]), VhostKernel { known: 1 << VIRTIO_F_VERSION_1 });
        assert_eq!(net.attend().unwrap(), Attention::Nothing);
        net.recover().unwrap();
        drop(far);
        assert!(net.attend().unwrap_err().to_string().starts_with("cannot go on: sockets was deleted"));
        assert!(net.recover().unwrap_err().to_string().starts_with("cannot open the tap again: sockets was deleted"));
    }

    #[test]
    fn rings_that_make_no_sense_to_the_kernel_are_the_driver_s_mistake_and_all_else_is_a_loss() {
        let told = |errno| refused(VhostError::IoctlError(io::Error::from_raw_os_error(errno)));
        assert!(matches!((told(libc::EINVAL), told(libc::EFAULT)), (StartError::Refused(_), StartError::Refused(_))));
        assert!(matches!((told(libc::EBADF), told(libc::ENOMEM)), (StartError::Lost(_), StartError::Lost(_))));
    }

    #[test]
    fn all_guest_memory_is_in_the_table() {
        let memory = GuestMemoryMmap::from_ranges(&[
            (vm_memory::GuestAddress(0), 0x10_000),
            (vm_memory::GuestAddress(1 << 32), 0x20_000),
        ]);
        let memory = memory.unwrap();
        let table = regions(&memory).unwrap();
        let shape: Vec<_> = table.iter().map(|region| (region.guest_phys_addr, region.memory_size)).collect();
        assert_eq!(shape, [(0, 0x10_000), (1 << 32, 0x20_000)]);
        assert!(table.iter().all(|region| region.userspace_addr != 0));
    }
}
