//! A function passed to this program through VFIO, and the memory that it reaches (`linux/vfio.h`).

use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::ptr;

use vfio_bindings::bindings::vfio::{
    VFIO_BASE, VFIO_DMA_MAP_FLAG_READ, VFIO_DMA_MAP_FLAG_WRITE, VFIO_PCI_CONFIG_REGION_INDEX, VFIO_TYPE,
    VFIO_TYPE1v2_IOMMU, vfio_iommu_type1_dma_map, vfio_iommu_type1_dma_unmap, vfio_region_info,
};
use vmm_sys_util::ioctl::{ioctl_with_mut_ref, ioctl_with_ptr, ioctl_with_ref, ioctl_with_val};

const fn number(nr: u32) -> libc::c_ulong {
    (VFIO_TYPE as libc::c_ulong) << 8 | (VFIO_BASE + nr) as libc::c_ulong
}

const SET_IOMMU: libc::c_ulong = number(2);
const GROUP_SET_CONTAINER: libc::c_ulong = number(4);
const GROUP_GET_DEVICE_FD: libc::c_ulong = number(6);
const DEVICE_GET_REGION_INFO: libc::c_ulong = number(8);
const IOMMU_MAP_DMA: libc::c_ulong = number(13);
const IOMMU_UNMAP_DMA: libc::c_ulong = number(14);

/// The Command register, and its bits Memory Space Enable and Bus Master Enable.
const COMMAND: u64 = 4;
const MEMORY_AND_MASTER: u16 = 6;

/// Panics with the kernel's error if `result` is one. Returns `result`.
fn checked(what: &str, result: i32) -> i32 {
    assert!(result >= 0, "{what}: {}", io::Error::last_os_error());
    result
}

/// Bytes of this process, which it and devices use at the same time.
#[derive(Clone, Copy)]
pub(crate) struct Shared {
    start: *mut u8,
    len: usize,
}

impl Shared {
    fn mapping(len: usize, flags: i32, fd: i32, offset: i64) -> Shared {
        // SAFETY: the kernel chooses an unused address.
        let start = unsafe { libc::mmap(ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, fd, offset) };
        assert_ne!(start, libc::MAP_FAILED, "mapping {len} bytes: {}", io::Error::last_os_error());
        Shared { start: start.cast(), len }
    }

    /// Memory, which stays until the process ends.
    pub(crate) fn memory(len: usize) -> Shared {
        Shared::mapping(len, libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_POPULATE, -1, 0)
    }

    fn at<T: Copy>(&self, offset: usize) -> *mut T {
        let len = size_of::<T>();
        assert!(offset.is_multiple_of(len) && offset + len <= self.len, "{offset:#x} of {:#x}", self.len);
        // SAFETY: the address is inside of the mapping, as was just checked.
        unsafe { self.start.add(offset) }.cast()
    }

    /// Reads a register or a field.
    pub(crate) fn read<T: Copy>(&self, offset: usize) -> T {
        // SAFETY: the address is aligned and inside of the mapping, and all bits are valid for the type.
        unsafe { self.at::<T>(offset).read_volatile() }
    }

    /// Writes a register or a field.
    pub(crate) fn write<T: Copy>(&self, offset: usize, value: T) {
        // SAFETY: as for `read`.
        unsafe { self.at::<T>(offset).write_volatile(value) }
    }

    /// Writes `bytes`.
    pub(crate) fn fill(&self, offset: usize, bytes: &[u8]) {
        bytes.iter().enumerate().for_each(|(n, byte)| self.write(offset + n, *byte));
    }

    /// `len` bytes.
    pub(crate) fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        (offset..offset + len).map(|at| self.read(at)).collect()
    }
}

/// Access of a function to memory that is mapped for it.
#[derive(Clone, Copy)]
pub(crate) enum Access {
    Read,
    Write,
    Both,
}

/// A function, alone in its group, in a container of its own.
pub(crate) struct Function {
    container: File,
    // Open as long as the function is used.
    _group: File,
    device: File,
    configuration: u64,
}

impl Function {
    /// Opens the function at `address`, which is bound to vfio-pci, and enables decoding and bus mastering.
    pub(crate) fn open(address: &str) -> Function {
        let link = fs::read_link(format!("/sys/bus/pci/devices/{address}/iommu_group")).expect("it has a group");
        let group = link.file_name().expect("a number").to_string_lossy().into_owned();
        let open = |path: &str| {
            File::options().read(true).write(true).open(path).unwrap_or_else(|error| panic!("{path}: {error}"))
        };
        let (container, group) = (open("/dev/vfio/vfio"), open(&format!("/dev/vfio/{group}")));
        // SAFETY: the kernel reads a descriptor's number.
        checked("the container", unsafe { ioctl_with_ref(&group, GROUP_SET_CONTAINER, &container.as_raw_fd()) });
        // SAFETY: the call takes a number.
        checked("the IOMMU", unsafe { ioctl_with_val(&container, SET_IOMMU, VFIO_TYPE1v2_IOMMU.into()) });
        let name = CString::new(address).expect("an address has no NUL");
        // SAFETY: the kernel reads the string.
        let device = checked(address, unsafe { ioctl_with_ptr(&group, GROUP_GET_DEVICE_FD, name.as_ptr()) });
        // SAFETY: the kernel has just created this descriptor.
        let device = unsafe { File::from_raw_fd(device) };
        let mut function = Function { container, _group: group, device, configuration: 0 };
        function.configuration = function.region(VFIO_PCI_CONFIG_REGION_INDEX).0;
        let command = function.config::<2>(COMMAND);
        let command = (u16::from_le_bytes(command) | MEMORY_AND_MASTER).to_le_bytes();
        function.device.write_all_at(&command, function.configuration + COMMAND).expect("Command is written");
        function
    }

    /// Offset of a region in the device's file, and its size.
    fn region(&self, index: u32) -> (u64, u64) {
        let argsz = u32::try_from(size_of::<vfio_region_info>()).expect("a structure");
        let mut info = vfio_region_info { argsz, index, ..Default::default() };
        // SAFETY: the kernel writes only the structure, whose size it is given.
        checked("a region", unsafe { ioctl_with_mut_ref(&self.device, DEVICE_GET_REGION_INFO, &mut info) });
        (info.offset, info.size)
    }

    /// `N` bytes of configuration space.
    pub(crate) fn config<const N: usize>(&self, offset: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.device.read_exact_at(&mut bytes, self.configuration + offset).expect("configuration space is read");
        bytes
    }

    /// The registers of a BAR.
    pub(crate) fn bar(&self, index: u8) -> Shared {
        let (offset, size) = self.region(index.into());
        let (offset, size) = (offset.cast_signed(), usize::try_from(size).expect("a BAR"));
        Shared::mapping(size, libc::MAP_SHARED, self.device.as_raw_fd(), offset)
    }

    /// Maps `memory` at `address` for the function.
    pub(crate) fn map(&self, address: u64, memory: Shared, access: Access) {
        let flags = match access {
            Access::Read => VFIO_DMA_MAP_FLAG_READ,
            Access::Write => VFIO_DMA_MAP_FLAG_WRITE,
            Access::Both => VFIO_DMA_MAP_FLAG_READ | VFIO_DMA_MAP_FLAG_WRITE,
        };
        let argsz = u32::try_from(size_of::<vfio_iommu_type1_dma_map>()).expect("a structure");
        let (vaddr, size) = (memory.start.addr() as u64, memory.len as u64);
        let map = vfio_iommu_type1_dma_map { argsz, flags, vaddr, iova: address, size };
        // SAFETY: the kernel reads the structure; the memory is only accessed with volatile reads and writes.
        checked("mapping", unsafe { ioctl_with_ref(&self.container, IOMMU_MAP_DMA, &map) });
    }

    /// Unmaps `len` bytes at `address`. They are out of the function's reach when this returns.
    pub(crate) fn unmap(&self, address: u64, len: usize) {
        let argsz = u32::try_from(size_of::<vfio_iommu_type1_dma_unmap>()).expect("a structure");
        let mut unmap = vfio_iommu_type1_dma_unmap { argsz, iova: address, size: len as u64, ..Default::default() };
        // SAFETY: the kernel reads and writes only the structure, whose size it is given.
        checked("unmapping", unsafe { ioctl_with_mut_ref(&self.container, IOMMU_UNMAP_DMA, &mut unmap) });
        assert_eq!(unmap.size, len as u64, "all of it was mapped");
    }
}
