//! VFIO's system calls (`linux/vfio.h`).
//!
//! The crate vfio-ioctls is not used: it hides why the kernel refuses an interrupt, a reset or a group; a container
//! always keeps the first KVM VM, while a reboot here creates another one; and it cannot set some of the interrupts.
//! The structures come from vfio-bindings.

use std::ffi::CStr;
use std::io;
use std::mem::{offset_of, size_of};
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::raw::c_ulong;

use vfio_bindings::bindings::vfio::{
    VFIO_API_VERSION, VFIO_BASE, VFIO_DMA_MAP_FLAG_READ, VFIO_DMA_MAP_FLAG_WRITE, VFIO_GROUP_FLAGS_VIABLE,
    VFIO_IRQ_SET_ACTION_TRIGGER, VFIO_IRQ_SET_ACTION_UNMASK, VFIO_IRQ_SET_DATA_EVENTFD, VFIO_IRQ_SET_DATA_NONE,
    VFIO_PCI_NUM_IRQS, VFIO_TYPE, VFIO_TYPE1v2_IOMMU, vfio_device_attach_iommufd_pt, vfio_device_bind_iommufd,
    vfio_device_detach_iommufd_pt, vfio_device_info, vfio_group_status, vfio_iommu_type1_dma_map,
    vfio_iommu_type1_dma_unmap, vfio_iommu_type1_info, vfio_irq_info, vfio_irq_set, vfio_region_info,
};
use vm_memory::Permissions;
use vmm_sys_util::ioctl::{
    ioctl, ioctl_with_mut_ptr, ioctl_with_mut_ref, ioctl_with_ptr, ioctl_with_ref, ioctl_with_val,
};

use crate::vfio::kernel::info::u32_at;
use crate::vfio::piece::Piece;

const fn number(nr: u32) -> c_ulong {
    (VFIO_TYPE as c_ulong) << 8 | (VFIO_BASE + nr) as c_ulong
}

const GET_API_VERSION: c_ulong = number(0);
const CHECK_EXTENSION: c_ulong = number(1);
const SET_IOMMU: c_ulong = number(2);
const GROUP_GET_STATUS: c_ulong = number(3);
const GROUP_SET_CONTAINER: c_ulong = number(4);
const GROUP_GET_DEVICE_FD: c_ulong = number(6);
const DEVICE_GET_INFO: c_ulong = number(7);
const DEVICE_GET_REGION_INFO: c_ulong = number(8);
const DEVICE_GET_IRQ_INFO: c_ulong = number(9);
const DEVICE_SET_IRQS: c_ulong = number(10);
const DEVICE_RESET: c_ulong = number(11);
const IOMMU_GET_INFO: c_ulong = number(12);
const IOMMU_MAP_DMA: c_ulong = number(13);
const IOMMU_UNMAP_DMA: c_ulong = number(14);
const DEVICE_BIND_IOMMUFD: c_ulong = number(18);
const DEVICE_ATTACH_IOMMUFD_PT: c_ulong = number(19);
const DEVICE_DETACH_IOMMUFD_PT: c_ulong = number(20);

/// The longest description of a device or a container, in bytes.
const MOST: usize = 1 << 20;

/// The error of a call that has returned `result`, if it is one.
pub(crate) fn checked(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// The size of a structure, in the type of VFIO's calls.
pub(crate) const fn size_of_u32<T>() -> u32 {
    size_of::<T>() as u32
}

/// True if the container has the API version that this program supports, and the type 1 IOMMU.
pub(crate) fn is_type1(container: &impl AsRawFd) -> bool {
    // SAFETY: neither call takes a pointer.
    let (version, type1) = unsafe {
        (ioctl(container, GET_API_VERSION), ioctl_with_val(container, CHECK_EXTENSION, VFIO_TYPE1v2_IOMMU.into()))
    };
    version == VFIO_API_VERSION.cast_signed() && type1 > 0
}

/// Gives `container`, which has its first group, the type 1 IOMMU.
pub(crate) fn set_type1(container: &impl AsRawFd) -> io::Result<()> {
    // SAFETY: the call takes a number.
    checked(unsafe { ioctl_with_val(container, SET_IOMMU, VFIO_TYPE1v2_IOMMU.into()) }).map(drop)
}

/// True if each device of `group` is bound to VFIO or has no driver.
pub(crate) fn is_viable(group: &impl AsRawFd) -> io::Result<bool> {
    let mut status = vfio_group_status { argsz: size_of_u32::<vfio_group_status>(), ..Default::default() };
    // SAFETY: the kernel writes only the structure, whose size it is given.
    checked(unsafe { ioctl_with_mut_ref(group, GROUP_GET_STATUS, &mut status) })?;
    Ok(status.flags & VFIO_GROUP_FLAGS_VIABLE != 0)
}

/// Puts `group` into `container`, until it is closed.
pub(crate) fn set_container(group: &impl AsRawFd, container: RawFd) -> io::Result<()> {
    // SAFETY: the kernel reads the descriptor's number.
    checked(unsafe { ioctl_with_ref(group, GROUP_SET_CONTAINER, &container) }).map(drop)
}

/// Opens the device `name` of `group`.
pub(crate) fn open_device(group: &impl AsRawFd, name: &CStr) -> io::Result<OwnedFd> {
    // SAFETY: the kernel reads the string, which ends with a NUL.
    let fd = checked(unsafe { ioctl_with_ptr(group, GROUP_GET_DEVICE_FD, name.as_ptr()) })?;
    // SAFETY: the kernel has just created this descriptor for the caller.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Binds the device file `device` to `iommufd`, until the file is closed.
pub(crate) fn bind(device: &impl AsRawFd, iommufd: RawFd) -> io::Result<()> {
    // Kernels before 6.17 reject the fields after the device's number, so these are left out.
    let argsz = u32::try_from(offset_of!(vfio_device_bind_iommufd, token_uuid_ptr)).unwrap_or_default();
    let mut bind = vfio_device_bind_iommufd { argsz, iommufd, ..Default::default() };
    // SAFETY: the kernel reads and writes only the given size, which the structure has.
    checked(unsafe { ioctl_with_mut_ref(device, DEVICE_BIND_IOMMUFD, &mut bind) }).map(drop)
}

/// Attaches `device` to the address space `ioas` of its iommufd, in place of the present one.
pub(crate) fn attach(device: &impl AsRawFd, ioas: u32) -> io::Result<()> {
    let argsz = u32::try_from(offset_of!(vfio_device_attach_iommufd_pt, pasid)).unwrap_or_default();
    let mut attach = vfio_device_attach_iommufd_pt { argsz, pt_id: ioas, ..Default::default() };
    // SAFETY: the kernel reads and writes only the given size, which the structure has.
    checked(unsafe { ioctl_with_mut_ref(device, DEVICE_ATTACH_IOMMUFD_PT, &mut attach) }).map(drop)
}

/// Detaches `device` from its address space. The device then reaches nothing.
pub(crate) fn detach(device: &impl AsRawFd) -> io::Result<()> {
    let argsz = u32::try_from(offset_of!(vfio_device_detach_iommufd_pt, pasid)).unwrap_or_default();
    let detach = vfio_device_detach_iommufd_pt { argsz, ..Default::default() };
    // SAFETY: the kernel reads only the given size, which the structure has.
    checked(unsafe { ioctl_with_ref(device, DEVICE_DETACH_IOMMUFD_PT, &detach) }).map(drop)
}

/// Reads a description whose structure has `size` bytes and starts with its size, flags and an index.
fn ask(file: &impl AsRawFd, question: c_ulong, size: usize, index: u32) -> io::Result<Vec<u8>> {
    let mut size = size;
    loop {
        // Words, for alignment.
        let mut words = vec![0_u64; size.div_ceil(8)];
        let argsz = u64::try_from(size).unwrap_or(u64::MAX) & 0xffff_ffff;
        if let [first, second, ..] = words.as_mut_slice() {
            *first = argsz;
            *second = index.into();
        }
        // SAFETY: the kernel writes at most the given number of bytes.
        checked(unsafe { ioctl_with_mut_ptr(file, question, words.as_mut_ptr()) })?;
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        match u32_at(&bytes, 0) as usize {
            needed if needed > size && needed <= MOST => size = needed,
            _ => return Ok(bytes),
        }
    }
}

/// Description of `device`.
pub(crate) fn device_info(device: &impl AsRawFd) -> io::Result<vfio_device_info> {
    let mut info = vfio_device_info { argsz: size_of_u32::<vfio_device_info>(), ..Default::default() };
    // SAFETY: the kernel writes only the structure, whose size it is given.
    checked(unsafe { ioctl_with_mut_ref(device, DEVICE_GET_INFO, &mut info) })?;
    Ok(info)
}

/// Description of region `index` of `device`, with its capabilities.
pub(crate) fn region_info(device: &impl AsRawFd, index: u32) -> io::Result<Vec<u8>> {
    ask(device, DEVICE_GET_REGION_INFO, size_of::<vfio_region_info>(), index)
}

/// Description of the interrupts `index` of `device`.
pub(crate) fn irq_info(device: &impl AsRawFd, index: u32) -> io::Result<vfio_irq_info> {
    let mut info = vfio_irq_info { argsz: size_of_u32::<vfio_irq_info>(), index, ..Default::default() };
    // SAFETY: the kernel writes only the structure, whose size it is given.
    checked(unsafe { ioctl_with_mut_ref(device, DEVICE_GET_IRQ_INFO, &mut info) })?;
    Ok(info)
}

/// Makes the interrupts of kind `index` from `start` on signal `eventfds`; one with `None` signals nothing. An empty
/// slice turns the kind off.
pub(crate) fn set_irqs<F: AsFd>(
    device: &impl AsRawFd,
    index: u32,
    start: u32,
    eventfds: &[Option<F>],
) -> io::Result<()> {
    set_eventfds(device, VFIO_IRQ_SET_ACTION_TRIGGER, index, start, eventfds)
}

/// Turns off all interrupts of `device`. The kernel refuses kinds that the device lacks, which are off anyway.
pub(crate) fn clear_all_irqs(device: &impl AsRawFd) {
    for index in 0..VFIO_PCI_NUM_IRQS {
        let _ = set_irqs::<OwnedFd>(device, index, 0, &[]);
    }
}

/// Makes a signal on `eventfd` unmask the interrupt 0 of kind `index`, which must be on.
pub(crate) fn set_unmask(device: &impl AsRawFd, index: u32, eventfd: impl AsFd) -> io::Result<()> {
    set_eventfds(device, VFIO_IRQ_SET_ACTION_UNMASK, index, 0, &[Some(eventfd)])
}

fn set_eventfds<F: AsFd>(
    device: &impl AsRawFd,
    action: u32,
    index: u32,
    start: u32,
    eventfds: &[Option<F>],
) -> io::Result<()> {
    let data = if eventfds.is_empty() { VFIO_IRQ_SET_DATA_NONE } else { VFIO_IRQ_SET_DATA_EVENTFD };
    let count = u32::try_from(eventfds.len()).map_err(io::Error::other)?;
    let size = size_of_u32::<vfio_irq_set>() + count * size_of_u32::<i32>();
    let mut words = vec![size, data | action, index, start, count];
    words.extend(eventfds.iter().map(|eventfd| {
        let fd = eventfd.as_ref().map_or(-1, |eventfd| eventfd.as_fd().as_raw_fd());
        fd.cast_unsigned()
    }));
    // SAFETY: the kernel reads the number of bytes in the first word, which is the length of `words`.
    checked(unsafe { ioctl_with_ptr(device, DEVICE_SET_IRQS, words.as_ptr()) }).map(drop)
}

/// Resets `device`.
pub(crate) fn reset(device: &impl AsRawFd) -> io::Result<()> {
    // SAFETY: the call takes no argument.
    checked(unsafe { ioctl(device, DEVICE_RESET) }).map(drop)
}

/// Description of the IOMMU of `container`.
pub(crate) fn iommu_info(container: &impl AsRawFd) -> io::Result<Vec<u8>> {
    ask(container, IOMMU_GET_INFO, size_of::<vfio_iommu_type1_info>(), 0)
}

/// Maps `piece` for the devices of `container`.
///
/// # Safety
///
/// Until [`unmap`] has returned, or the container is closed, the piece must be a mapping without a Rust reference in
/// this process.
pub(crate) unsafe fn map(container: &impl AsRawFd, piece: &Piece) -> io::Result<()> {
    let when = |access, flag| if piece.access.allow(access) { flag } else { 0 };
    let map = vfio_iommu_type1_dma_map {
        argsz: size_of_u32::<vfio_iommu_type1_dma_map>(),
        flags: when(Permissions::Read, VFIO_DMA_MAP_FLAG_READ) | when(Permissions::Write, VFIO_DMA_MAP_FLAG_WRITE),
        vaddr: piece.host,
        iova: piece.iova,
        size: piece.size,
    };
    // SAFETY: the kernel reads the structure; the caller promises that the memory may be written to.
    checked(unsafe { ioctl_with_ref(container, IOMMU_MAP_DMA, &map) }).map(drop)
}

/// Unmaps the pieces at these addresses for the devices of `container`; each must have been mapped as a whole. Returns
/// the number of bytes that were mapped.
pub(crate) fn unmap(container: &impl AsRawFd, addresses: RangeInclusive<u64>) -> io::Result<u64> {
    let (iova, argsz) = (*addresses.start(), size_of_u32::<vfio_iommu_type1_dma_unmap>());
    // The size of all 2^64 addresses does not fit. No IOMMU has so many.
    let size = (addresses.end() - iova).checked_add(1).ok_or(io::ErrorKind::InvalidInput)?;
    let mut unmap = vfio_iommu_type1_dma_unmap { argsz, iova, size, ..Default::default() };
    // SAFETY: the kernel reads and writes only the structure, whose size it is given.
    checked(unsafe { ioctl_with_mut_ref(container, IOMMU_UNMAP_DMA, &mut unmap) })?;
    Ok(unmap.size)
}
