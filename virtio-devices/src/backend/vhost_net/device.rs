//! A device of the kernel that serves one pair of queues.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use vhost::net::VhostNet as _;
use vhost::vhost_kern::VhostKernBackend;
use vhost::vhost_kern::net::Net;
use vhost::vhost_kern::vhost_binding::{
    VHOST_BACKEND_F_IOTLB_MSG_V2, VHOST_GET_BACKEND_FEATURES, VHOST_SET_BACKEND_FEATURES, VHOST_SET_VRING_ADDR,
    vhost_vring_addr,
};
use vhost::{Error as VhostError, VhostBackend, VhostUserMemoryRegionInfo};
use virtio_bindings::virtio_config::{VIRTIO_F_ACCESS_PLATFORM, VIRTIO_F_VERSION_1};
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress, Permissions};
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::ioctl::{ioctl_with_mut_ref, ioctl_with_ref};

use super::error::{VhostNetError, unusable};
use super::follower::Kernels;
use super::iotlb::{self, Miss};
use crate::GuestMap;
use crate::backend::vhost_common::{VHOST_F_LOG_ALL, io_error, rings};
use crate::backend::{QueueRun, RunnerError, RunnerQueue, SharedLog, StartError};
use crate::memory::Translate;
use crate::queue::ring::areas;
use crate::transport::features::has;

/// The kernel's own index of a pair's queue: receive, transmit.
pub(super) const QUEUES_PER_DEVICE: u16 = 2;
/// The feature bit of a device that logs its writes to guest memory (`VHOST_F_LOG_ALL`).
const LOG_ALL: u64 = 1 << VHOST_F_LOG_ALL;
/// The feature bit of a device that asks for translations of the addresses of its rings and buffers.
const TRANSLATED: u64 = 1 << VIRTIO_F_ACCESS_PLATFORM;
/// The feature of a kernel that asks in version 2 messages.
const MESSAGES_V2: u64 = 1 << VHOST_BACKEND_F_IOTLB_MSG_V2;

/// The kernel's vhost-net.
#[derive(Debug, Clone, Copy)]
pub struct VhostKernel {
    /// The feature bits that the kernel supports.
    pub(super) known: u64,
}

impl VhostKernel {
    /// Determines what the kernel supports.
    ///
    /// # Errors
    ///
    /// Fails if there is no vhost-net, or this user may not use it.
    pub fn ask() -> Result<Self, VhostNetError> {
        let net = Net::new(Arc::new(GuestMap::new())).map_err(|error| unusable(io_error(error)))?;
        let known = net.get_features().map_err(|error| VhostNetError::Device(io_error(error)))?;
        let asks = backend_features(&net).is_ok_and(|features| features & MESSAGES_V2 != 0);
        let known = if asks { known } else { known & !TRANSLATED };
        if has(known, VIRTIO_F_VERSION_1) { Ok(Self { known }) } else { Err(VhostNetError::Legacy) }
    }

    /// Checks that a function behind an IOMMU can use the kernel's vhost-net.
    ///
    /// # Errors
    ///
    /// Fails if the kernel accesses memory by guest physical addresses only.
    pub fn behind_iommu(self) -> Result<Self, VhostNetError> {
        if self.known & TRANSLATED != 0 { Ok(self) } else { Err(VhostNetError::NoIotlb) }
    }

    pub(super) fn logs_writes(self) -> bool {
        self.known & LOG_ALL != 0
    }
}

/// The kernel's device for one pair.
pub(super) struct Device {
    pub(super) pair: u16,
    pub(super) net: Arc<Net<Arc<GuestMap>>>,
    /// The memory that the kernel accesses, kept mapped.
    pub(super) memory: GuestMap,
    /// The feature bits that were set in the kernel, without that of the log.
    features: u64,
    /// The pair's queues that the driver enabled.
    queues: Vec<RunnerQueue>,
    pub(super) active: bool,
}

impl Device {
    /// Opens a device for `pair`, which signals `broken` on an invalid ring. It is not active. If addresses are
    /// translated, it has no translations yet.
    pub(super) fn start(
        pair: u16,
        kernel: VhostKernel,
        run: &QueueRun<'_>,
        memory: &Arc<GuestMap>,
        (broken, log): (Option<&EventFd>, Option<&SharedLog>),
    ) -> Result<Self, StartError> {
        let lost = |error| StartError::Lost(RunnerError::of("set up vhost-net")(io_error(error)));
        let net = Arc::new(Net::new(Arc::clone(memory)).map_err(lost)?);
        net.set_owner().map_err(lost)?;
        let features = run.features & kernel.known & !(LOG_ALL | TRANSLATED);
        let features = if run.dma.has_iommu() { features | TRANSLATED } else { features };
        if features & TRANSLATED != 0 {
            set_backend_features(&net, MESSAGES_V2).map_err(|error| lost(VhostError::IoctlError(error)))?;
        }
        net.set_features(features).map_err(lost)?;
        net.set_mem_table(&regions(memory).map_err(lost)?).map_err(lost)?;
        let queues = run.queues.iter().filter(|queue| queue.index / QUEUES_PER_DEVICE == pair).cloned().collect();
        let device = Self { pair, net, memory: GuestMap::clone(memory), features, queues, active: false };
        for (queue, index) in device.queues.iter().zip(device.indices()) {
            device.place(index, queue).map_err(refused)?;
            device.connect(index, queue, broken).map_err(lost)?;
        }
        log.map_or(Ok(()), |log| device.begin_log(log)).map_err(lost)?;
        Ok(device)
    }

    /// Gives the kernel the eventfds of `queue`.
    fn connect(&self, index: usize, queue: &RunnerQueue, broken: Option<&EventFd>) -> vhost::Result<()> {
        self.net.set_vring_kick(index, &queue.kick)?;
        self.net.set_vring_call(index, &queue.call)?;
        broken.map_or(Ok(()), |broken| self.net.set_vring_err(index, broken))
    }

    /// Sets the rings of `queue` and its position.
    fn place(&self, index: usize, queue: &RunnerQueue) -> vhost::Result<()> {
        self.net.set_vring_num(index, queue.size)?;
        self.set_rings(index, queue, false)?;
        self.net.set_vring_base(index, queue.position)
    }

    /// Makes the kernel run the queues over `tap`, or stop them.
    pub(super) fn set_backend(&self, tap: Option<&File>) -> vhost::Result<()> {
        self.indices().try_for_each(|index| self.net.set_backend(index, tap))
    }

    /// Stops all queues, as [`Self::set_backend`] without a tap: a refusal must not keep other queues running, and ends
    /// with the device at the latest.
    pub(super) fn stop(&self) {
        self.indices().for_each(|index| drop(self.net.set_backend(index, None)));
    }

    /// The kernel's indices of the queues.
    pub(super) fn indices(&self) -> impl Iterator<Item = usize> {
        self.queues.iter().map(|queue| usize::from(queue.index % QUEUES_PER_DEVICE))
    }

    fn is_translated(&self) -> bool {
        self.features & TRANSLATED != 0
    }

    /// The descriptor that becomes readable on a miss; `None` without translation.
    pub(super) fn asks(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: the device is open as long as it is borrowed.
        self.is_translated().then(|| unsafe { BorrowedFd::borrow_raw(self.net.as_raw_fd()) })
    }

    /// The next miss of the kernel.
    ///
    /// # Errors
    ///
    /// Fails if it cannot be read.
    pub(super) fn miss(&self) -> io::Result<Option<Miss>> {
        self.asks().map_or(Ok(None), iotlb::read_miss)
    }

    /// Sends the translations of the rings, before the kernel asks.
    pub(super) fn preload(&self, kernels: &Kernels, iommu: &dyn Translate) {
        for queue in &self.queues {
            let bases = [queue.descriptors, queue.available, queue.used].map(|base| base.raw_value());
            let accesses = [Permissions::Read, Permissions::Read, Permissions::Write];
            for ((base, len), access) in bases.into_iter().zip(areas(queue.size)).zip(accesses) {
                kernels.preload((base, len), access, iommu);
            }
        }
    }

    /// Makes the kernel log its writes, also while it runs the queues. Invalidates all translations.
    pub(super) fn begin_log(&self, log: &SharedLog) -> vhost::Result<()> {
        // The kernel checks each step with those before it.
        self.net.set_log_base(log.address(), None)?;
        self.place_rings(true)?;
        self.net.set_features(self.features | LOG_ALL)
    }

    /// Ends the log, whose memory is not touched afterwards. Invalidates all translations.
    pub(super) fn end_log(&self) -> vhost::Result<()> {
        self.net.set_features(self.features)?;
        self.place_rings(false)
    }

    fn place_rings(&self, logged: bool) -> vhost::Result<()> {
        self.queues.iter().zip(self.indices()).try_for_each(|(queue, index)| self.set_rings(index, queue, logged))
    }

    /// Works as the method of the same purpose in `vhost`, which refuses rings that end at the end of a region of guest
    /// memory, and accepts only addresses of this process. The caller has checked that the rings lie in guest memory,
    /// and the kernel checks it again.
    fn set_rings(&self, index: usize, queue: &RunnerQueue, logged: bool) -> vhost::Result<()> {
        let config = rings(queue, logged);
        let rings = if self.is_translated() {
            // With translation, writes to the used ring are logged by its place in the memory table, and not by this
            // address.
            vhost_vring_addr {
                index: u32::try_from(index).map_err(|_| VhostError::InvalidQueue)?,
                flags: config.flags,
                desc_user_addr: config.desc_table_addr,
                used_user_addr: config.used_ring_addr,
                avail_user_addr: config.avail_ring_addr,
                log_guest_addr: config.used_ring_addr,
            }
        } else {
            config.to_vhost_vring_addr(index, self.net.mem())?
        };
        // SAFETY: the kernel reads one structure of this type.
        let set = unsafe { ioctl_with_ref(&*self.net, VHOST_SET_VRING_ADDR(), &rings) };
        if set < 0 { Err(VhostError::IoctlError(io::Error::last_os_error())) } else { Ok(()) }
    }
}

/// Classifies the kernel's refusal of a queue: `EINVAL` and `EFAULT` mean invalid rings.
fn refused(error: vhost::Error) -> StartError {
    let error = RunnerError::of("set up a queue of vhost-net")(io_error(error));
    match error.source.raw_os_error() {
        Some(libc::EINVAL | libc::EFAULT) => StartError::Refused(error),
        _ => StartError::Lost(error),
    }
}

fn backend_features(net: &Net<Arc<GuestMap>>) -> io::Result<u64> {
    let mut features = 0;
    // SAFETY: the kernel writes one number of this type.
    let got = unsafe { ioctl_with_mut_ref(net, VHOST_GET_BACKEND_FEATURES(), &mut features) };
    if got < 0 { Err(io::Error::last_os_error()) } else { Ok(features) }
}

fn set_backend_features(net: &Net<Arc<GuestMap>>, features: u64) -> io::Result<()> {
    // SAFETY: the kernel reads one number of this type.
    let set = unsafe { ioctl_with_ref(net, VHOST_SET_BACKEND_FEATURES(), &features) };
    if set < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

pub(super) fn regions(memory: &GuestMap) -> vhost::Result<Vec<VhostUserMemoryRegionInfo>> {
    let region = |region: &<GuestMap as GuestMemoryBackend>::R| {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_rings_are_the_drivers_error_and_all_else_is_a_loss() {
        let told = |errno| refused(VhostError::IoctlError(io::Error::from_raw_os_error(errno)));
        assert!(matches!((told(libc::EINVAL), told(libc::EFAULT)), (StartError::Refused(_), StartError::Refused(_))));
        assert!(matches!((told(libc::EBADF), told(libc::ENOMEM)), (StartError::Lost(_), StartError::Lost(_))));
    }

    #[test]
    fn all_guest_memory_is_in_the_table() {
        let memory = GuestMap::from_ranges(&[
            (vm_memory::GuestAddress(0), 0x10_000),
            (vm_memory::GuestAddress(1 << 32), 0x20_000),
        ]);
        let memory = memory.unwrap();
        let table = regions(&memory).unwrap();
        let shape: Vec<_> = table.iter().map(|region| (region.guest_phys_addr, region.memory_size)).collect();
        assert_eq!(shape, [(0, 0x10_000), (1 << 32, 0x20_000)]);
        assert!(table.iter().all(|region| region.userspace_addr != 0));
    }

    #[test]
    fn a_kernel_without_translation_is_refused_behind_an_iommu() {
        let known = 1 << VIRTIO_F_VERSION_1;
        assert!(VhostKernel { known: known | TRANSLATED }.behind_iommu().is_ok());
        let error = VhostKernel { known }.behind_iommu().unwrap_err();
        assert!(error.to_string().ends_with("leave vhost out"), "{error}");
    }
}
