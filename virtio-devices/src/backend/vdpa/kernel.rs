//! The kernel's interface to a vDPA device: `/dev/vhost-vdpa-N` (Linux, `include/uapi/linux/vhost.h`).

use std::fs::File;
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use vhost::vdpa::VhostVdpa;
use vhost::vhost_kern::VhostKernFeatures;
use vhost::vhost_kern::vdpa::VhostKernVdpa;
use vhost::{VhostAccess, VhostBackend, VhostIotlbBackend, VhostIotlbMsg, VhostIotlbType};
use vm_memory::Permissions;
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::ioctl::ioctl;
use vmm_sys_util::ioctl_io_nr;

use super::vduse::MessageTimeout;
use crate::backend::mapping::Mapping;
use crate::backend::vhost_common::{io_error, rings};
use crate::backend::{DoorbellPage, RunnerQueue};
use crate::{GuestMap, Memory};

const VHOST: u32 = 0xaf;
ioctl_io_nr!(VHOST_VDPA_RESUME, VHOST, 0x7e);

/// An open device. Dropping it resets the device and removes its mappings.
pub(crate) trait Kernel: Send + Sync {
    /// Makes this process the owner of the device.
    fn set_owner(&self) -> io::Result<()>;
    /// Reads the device type (`virtio 1.4 §5`).
    fn device_id(&self) -> io::Result<u32>;
    /// Reads the kernel's features for the device, a bit for each [`BackendFeature`].
    fn backend_features(&self) -> io::Result<u64>;
    /// Selects some of these.
    fn set_backend_features(&mut self, features: u64) -> io::Result<()>;
    /// Reads the feature bits that the device offers.
    fn features(&self) -> io::Result<u64>;
    /// Negotiates these.
    fn set_features(&self, features: u64) -> io::Result<()>;
    /// Reads the device status (`virtio 1.4 §2.1`).
    fn status(&self) -> io::Result<u8>;
    /// Adds bits to the device status; 0 resets it. The kernel does not report a refusal by the device.
    fn set_status(&self, status: u8) -> io::Result<()>;
    /// Reads the length of the device configuration in bytes.
    fn config_size(&self) -> io::Result<u32>;
    /// Reads the device configuration at `offset`.
    fn config(&self, offset: u32, data: &mut [u8]) -> io::Result<()>;
    /// Writes the device configuration at `offset`. Read-only fields do not change.
    fn set_config(&self, offset: u32, data: &[u8]) -> io::Result<()>;
    /// Makes the device signal `call` when its configuration changes, until a reset.
    fn set_config_call(&self, call: &EventFd) -> io::Result<()>;
    /// Reads the number of queues, including the control queue.
    fn queue_count(&self) -> io::Result<u32>;
    /// Reads the largest size of a queue.
    fn queue_size(&self) -> io::Result<u16>;
    /// Reads the range of addresses that the device can access.
    fn iova_range(&self) -> io::Result<RangeInclusive<u64>>;
    /// Changes the mappings of the device.
    fn map(&self, message: Iotlb<'_>) -> io::Result<()>;
    /// Sets the size of a queue.
    fn set_queue_size(&self, queue: &RunnerQueue) -> io::Result<()>;
    /// Sets the addresses of a queue's rings, as guest physical addresses.
    fn set_queue_rings(&self, queue: &RunnerQueue) -> io::Result<()>;
    /// Sets the position of `queue`.
    fn set_queue_position(&self, queue: u16, position: u16) -> io::Result<()>;
    /// Sets the eventfd of the driver's doorbell.
    fn set_queue_kick(&self, queue: &RunnerQueue) -> io::Result<()>;
    /// Sets the eventfd that `queue` signals.
    fn set_queue_call(&self, queue: u16, call: &EventFd) -> io::Result<()>;
    /// Lets the device run a queue.
    fn enable_queue(&self, queue: u16) -> io::Result<()>;
    /// Maps the doorbell page of `queue`.
    fn doorbell_page(&self, queue: u16) -> io::Result<DoorbellPage>;
    /// Reads the position of a queue. The device itself answers, so this also shows that it is alive.
    fn queue_position(&self, queue: u16) -> io::Result<u16>;
    /// Stops the queues after the buffers in hand, and keeps all state.
    fn suspend(&self) -> io::Result<()>;
    /// Continues after [`Kernel::suspend`].
    fn resume(&self) -> io::Result<()>;
    /// The time that the kernel waits for the process behind the device, if there is one.
    fn message_timeout(&self) -> Option<MessageTimeout>;
    /// The version of Linux: major and minor number.
    fn release(&self) -> (u32, u32);
}

/// A change of a device's mappings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Iotlb<'a> {
    /// The following changes take effect together at [`Iotlb::End`].
    Begin,
    /// Adds the mapping.
    Update(&'a Mapping),
    /// Removes the mapping.
    Invalidate(&'a Mapping),
    /// The end of a batch.
    End,
}

/// The bit number of a kernel feature for a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum BackendFeature {
    /// Version 2 messages for [`Iotlb`].
    MessagesV2 = 1,
    /// [`Iotlb::Begin`] and [`Iotlb::End`].
    Batch = 2,
    /// [`Kernel::suspend`].
    Suspend = 4,
    /// [`Kernel::resume`].
    Resume = 5,
    /// [`Kernel::enable_queue`] while the device runs.
    EnableAfterDriverOk = 6,
    /// A reset keeps the device's mappings.
    IotlbPersist = 8,
}

impl BackendFeature {
    /// All features that are of use here.
    const ALL: [Self; 6] =
        [Self::MessagesV2, Self::Batch, Self::Suspend, Self::Resume, Self::EnableAfterDriverOk, Self::IotlbPersist];

    /// The bits of [`Self::ALL`].
    pub(crate) fn wanted() -> u64 {
        Self::ALL.iter().fold(0, |bits, feature| bits | feature.bit())
    }

    fn bit(self) -> u64 {
        1 << self as u8
    }

    /// True if `features` has this feature.
    pub(crate) fn is_in(self, features: u64) -> bool {
        features & self.bit() != 0
    }
}

/// The kernel itself.
pub(crate) struct Character(VhostKernVdpa<Memory>);

impl Character {
    /// Opens the device at `path`, which resets it.
    pub(crate) fn open(path: &Path) -> io::Result<Box<dyn Kernel>> {
        let fd = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty())?;
        // The device takes guest physical addresses, so no memory map is needed.
        let memory = Memory::new(GuestMap::new());
        Ok(Box::new(Self(VhostKernVdpa::with(File::from(fd), memory, 0))))
    }
}

impl Kernel for Character {
    fn set_owner(&self) -> io::Result<()> {
        self.0.set_owner().map_err(io_error)
    }

    fn device_id(&self) -> io::Result<u32> {
        self.0.get_device_id().map_err(io_error)
    }

    fn backend_features(&self) -> io::Result<u64> {
        self.0.get_backend_features().map_err(io_error)
    }

    fn set_backend_features(&mut self, features: u64) -> io::Result<()> {
        self.0.set_backend_features(features).map_err(io_error)
    }

    fn features(&self) -> io::Result<u64> {
        self.0.get_features().map_err(io_error)
    }

    fn set_features(&self, features: u64) -> io::Result<()> {
        self.0.set_features(features).map_err(io_error)
    }

    fn status(&self) -> io::Result<u8> {
        self.0.get_status().map_err(io_error)
    }

    fn set_status(&self, status: u8) -> io::Result<()> {
        self.0.set_status(status).map_err(io_error)
    }

    fn config_size(&self) -> io::Result<u32> {
        self.0.get_config_size().map_err(io_error)
    }

    fn config(&self, offset: u32, data: &mut [u8]) -> io::Result<()> {
        self.0.get_config(offset, data).map_err(io_error)
    }

    fn set_config(&self, offset: u32, data: &[u8]) -> io::Result<()> {
        self.0.set_config(offset, data).map_err(io_error)
    }

    fn set_config_call(&self, call: &EventFd) -> io::Result<()> {
        self.0.set_config_call(call).map_err(io_error)
    }

    fn queue_count(&self) -> io::Result<u32> {
        self.0.get_vqs_count().map_err(io_error)
    }

    fn queue_size(&self) -> io::Result<u16> {
        self.0.get_vring_num().map_err(io_error)
    }

    fn iova_range(&self) -> io::Result<RangeInclusive<u64>> {
        let range = self.0.get_iova_range().map_err(io_error)?;
        Ok(range.first..=range.last)
    }

    fn map(&self, message: Iotlb<'_>) -> io::Result<()> {
        let (msg_type, mapping) = match message {
            Iotlb::Begin => (VhostIotlbType::BatchBegin, None),
            Iotlb::Update(mapping) => (VhostIotlbType::Update, Some(mapping)),
            Iotlb::Invalidate(mapping) => (VhostIotlbType::Invalidate, Some(mapping)),
            Iotlb::End => (VhostIotlbType::BatchEnd, None),
        };
        let (iova, size, userspace_addr) = mapping.map_or((0, 0, 0), |part| (part.iova(), part.size(), part.host()));
        let perm = match mapping.map(Mapping::access) {
            Some(Permissions::Read) => VhostAccess::ReadOnly,
            Some(Permissions::Write) => VhostAccess::WriteOnly,
            _ => VhostAccess::ReadWrite,
        };
        let message = VhostIotlbMsg { iova, size, userspace_addr, perm, msg_type };
        self.0.send_iotlb_msg(&message).map_err(io_error)
    }

    fn set_queue_size(&self, queue: &RunnerQueue) -> io::Result<()> {
        self.0.set_vring_num(queue.index.into(), queue.size).map_err(io_error)
    }

    fn set_queue_rings(&self, queue: &RunnerQueue) -> io::Result<()> {
        // The inherent method passes the addresses on; the trait's method of the same name translates them to host
        // addresses.
        VhostKernVdpa::set_vring_addr(&self.0, queue.index.into(), &rings(queue, false)).map_err(io_error)
    }

    fn set_queue_position(&self, queue: u16, position: u16) -> io::Result<()> {
        self.0.set_vring_base(queue.into(), position).map_err(io_error)
    }

    fn set_queue_kick(&self, queue: &RunnerQueue) -> io::Result<()> {
        self.0.set_vring_kick(queue.index.into(), &queue.kick).map_err(io_error)
    }

    fn set_queue_call(&self, queue: u16, call: &EventFd) -> io::Result<()> {
        self.0.set_vring_call(queue.into(), call).map_err(io_error)
    }

    fn enable_queue(&self, queue: u16) -> io::Result<()> {
        self.0.set_vring_enable(queue.into(), true).map_err(io_error)
    }

    fn doorbell_page(&self, queue: u16) -> io::Result<DoorbellPage> {
        // SAFETY: the descriptor is open as long as it is borrowed.
        DoorbellPage::map(unsafe { BorrowedFd::borrow_raw(self.0.as_raw_fd()) }, queue)
    }

    fn queue_position(&self, queue: u16) -> io::Result<u16> {
        // The kernel keeps 16 bits of it in the lower half.
        self.0.get_vring_base(queue.into()).map(|base| base as u16).map_err(io_error)
    }

    fn suspend(&self) -> io::Result<()> {
        self.0.suspend().map_err(io_error)
    }

    fn resume(&self) -> io::Result<()> {
        // SAFETY: the request has no argument, and its result is checked.
        if unsafe { ioctl(&self.0, VHOST_VDPA_RESUME()) } < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    fn message_timeout(&self) -> Option<MessageTimeout> {
        // SAFETY: the descriptor is open as long as it is borrowed.
        MessageTimeout::of(unsafe { BorrowedFd::borrow_raw(self.0.as_raw_fd()) })
    }

    fn release(&self) -> (u32, u32) {
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        parse_release(&release)
    }
}

/// Major and minor number; 0.0 if the text is not a version.
fn parse_release(release: &str) -> (u32, u32) {
    let mut numbers = release.split(|letter: char| !letter.is_ascii_digit()).map(|number| number.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_two_numbers_whatever_follows() {
        for (text, version) in [
            ("6.12.95+deb13-amd64\n", (6, 12)),
            ("6.1.0-37-cloud-amd64", (6, 1)),
            ("5.14.0-427.el9", (5, 14)),
            ("7.2-rc1", (7, 2)),
            ("", (0, 0)),
        ] {
            assert_eq!(parse_release(text), version, "{text}");
        }
    }

    #[test]
    fn feature_bits_are_where_the_kernel_has_them() {
        assert_eq!(BackendFeature::wanted(), 0b1_0111_0110);
        assert!(BackendFeature::IotlbPersist.is_in(1 << 8) && !BackendFeature::Batch.is_in(1 << 8));
    }

    #[test]
    fn a_file_that_is_not_a_vdpa_device_refuses_the_first_request() {
        let kernel = Character::open(Path::new("/dev/null")).unwrap();
        assert_eq!(kernel.set_owner().unwrap_err().raw_os_error(), Some(libc::ENOTTY));
        assert!(Character::open(Path::new("/nonexistent")).is_err());
    }
}
