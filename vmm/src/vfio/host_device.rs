//! A host device, as VFIO presents it to a program.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::{pread, pwrite};
use vfio_bindings::bindings::vfio::{VFIO_DEVICE_FLAGS_PCI, VFIO_DEVICE_FLAGS_RESET};
use virtio_devices::{FileMapping, borrow_eventfd};
use vmm_sys_util::eventfd::EventFd;

use crate::vfio::attachment::attached::Attached;
use crate::vfio::error::VfioError;
use crate::vfio::kernel::info::{self, DeviceInfo, IrqInfo, RegionInfo};
use crate::vfio::kernel::ioctl;
use crate::vfio::kernel::sysfs::SysfsDevice;

/// A host device.
pub(crate) trait HostDevice: Send {
    /// Reads `data.len()` bytes at `offset` of a region. A device that was removed reads as all-ones.
    fn read(&self, region: usize, offset: u64, data: &mut [u8]);

    /// Writes `data` at `offset` of a region.
    fn write(&self, region: usize, offset: u64, data: &[u8]);

    /// Makes the interrupts of kind `index` from `start` on signal `eventfds`; an interrupt with `None` signals
    /// nothing.
    ///
    /// # Errors
    ///
    /// Fails if the host has no vector left, or the device has fewer.
    fn set_irqs(&self, index: u32, start: u32, eventfds: &[Option<Arc<EventFd>>]) -> io::Result<()>;

    /// Makes a signal on `eventfd` unmask the interrupt 0 of kind `index`, which is on, and which the host masks when
    /// it signals it. If the interrupt is still asserted then, it is signalled again.
    ///
    /// # Errors
    ///
    /// Fails if the kernel refuses.
    fn set_unmask(&self, index: u32, eventfd: &Arc<EventFd>) -> io::Result<()>;

    /// Turns the interrupts of kind `index` off.
    ///
    /// # Errors
    ///
    /// Fails if the kernel refuses.
    fn clear_irqs(&self, index: u32) -> io::Result<()>;

    /// Resets the device.
    ///
    /// # Errors
    ///
    /// Fails if the device cannot be reset, or does not return from the reset.
    fn reset(&self) -> io::Result<()>;

    /// Maps `len` bytes at `offset` of a region.
    ///
    /// # Errors
    ///
    /// Fails if they cannot be mapped.
    fn map(&self, region: usize, offset: u64, len: u64) -> io::Result<FileMapping>;
}

/// A device that the kernel has opened.
pub(super) struct KernelDevice {
    // Drop order: the device is closed before its group or iommufd.
    file: OwnedFd,
    /// Offset of each region in the file, and its length.
    regions: Vec<(u64, u64)>,
    _attached: Arc<Attached>,
}

impl fmt::Debug for KernelDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KernelDevice").field("file", &self.file).finish_non_exhaustive()
    }
}

impl KernelDevice {
    /// Opens a device of `attached`.
    ///
    /// # Errors
    ///
    /// Fails if it is not a PCI device, or the kernel refuses.
    pub(super) fn open(device: &SysfsDevice, attached: Arc<Attached>) -> Result<(Self, DeviceInfo), VfioError> {
        let file = attached.device(device)?;
        let about = ioctl::device_info(&file).map_err(VfioError::of("ask the device what it is"))?;
        if about.flags & VFIO_DEVICE_FLAGS_PCI == 0 {
            return Err(VfioError::NotPci);
        }
        let mut info = DeviceInfo { resets: about.flags & VFIO_DEVICE_FLAGS_RESET != 0, ..DeviceInfo::default() };
        // The kernel does not describe regions that a device lacks.
        for (index, region) in (0..about.num_regions).zip(&mut info.regions) {
            *region =
                ioctl::region_info(&file, index).map_or_else(|_| RegionInfo::default(), |info| info::region(&info));
        }
        for (index, irq) in (0..about.num_irqs).zip(&mut info.irqs) {
            let about = ioctl::irq_info(&file, index);
            *irq = about.map_or_else(|_| IrqInfo::default(), |irq| IrqInfo { flags: irq.flags, count: irq.count });
        }
        let regions = info.regions.iter().map(|region| (region.offset, region.size)).collect();
        Ok((Self { file, regions, _attached: attached }, info))
    }

    /// The place in the file of `len` bytes at `offset` of a region.
    fn place(&self, region: usize, offset: u64, len: usize) -> Option<u64> {
        let (start, size) = self.regions.get(region)?;
        let end = offset.checked_add(u64::try_from(len).ok()?)?;
        (end <= *size).then(|| start.checked_add(offset)).flatten()
    }
}

impl HostDevice for KernelDevice {
    fn read(&self, region: usize, offset: u64, data: &mut [u8]) {
        let read = self.place(region, offset, data.len()).map(|at| pread(&self.file, &mut *data, at));
        if !matches!(read, Some(Ok(read)) if read == data.len()) {
            data.fill(0xff);
        }
    }

    fn write(&self, region: usize, offset: u64, data: &[u8]) {
        if let Some(at) = self.place(region, offset, data.len()) {
            // A device that was removed ignores writes, like hardware.
            let _ = pwrite(&self.file, data, at);
        }
    }

    fn set_irqs(&self, index: u32, start: u32, eventfds: &[Option<Arc<EventFd>>]) -> io::Result<()> {
        let fds: Vec<_> =
            eventfds.iter().map(|eventfd| eventfd.as_ref().map(|eventfd| borrow_eventfd(eventfd))).collect();
        ioctl::set_irqs(&self.file, index, start, &fds)
    }

    fn set_unmask(&self, index: u32, eventfd: &Arc<EventFd>) -> io::Result<()> {
        ioctl::set_unmask(&self.file, index, borrow_eventfd(eventfd))
    }

    fn clear_irqs(&self, index: u32) -> io::Result<()> {
        ioctl::set_irqs::<OwnedFd>(&self.file, index, 0, &[])
    }

    fn reset(&self) -> io::Result<()> {
        ioctl::reset(&self.file)
    }

    fn map(&self, region: usize, offset: u64, len: u64) -> io::Result<FileMapping> {
        let length = usize::try_from(len).map_err(io::Error::other)?;
        let at = self.place(region, offset, length).ok_or(io::ErrorKind::InvalidInput)?;
        FileMapping::of_device(&self.file, at, len)
    }
}
