//! The numbers of the ioctls that filters allow: Linux's `include/uapi`.

#![allow(clippy::unnecessary_cast, reason = "types of constants differ between C libraries")]

use kvm_bindings::{
    KVMIO, kvm_clear_dirty_log, kvm_clock_data, kvm_cpuid2, kvm_create_device, kvm_debugregs, kvm_device_attr,
    kvm_dirty_log, kvm_enable_cap, kvm_ioeventfd, kvm_irq_routing, kvm_irqchip, kvm_irqfd, kvm_lapic_state,
    kvm_mp_state, kvm_msr_list, kvm_msrs, kvm_nested_state, kvm_regs, kvm_sregs, kvm_sregs2,
    kvm_userspace_memory_region, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};

use crate::lazy_memory::{present, userfault};

/// The type of vhost's ioctls (`linux/vhost.h`).
const VHOST: u32 = 0xaf;

/// The type of VFIO's ioctls (`linux/vfio.h`), and of iommufd's (`linux/iommufd.h`).
const VFIO_KIND: u32 = 0x3b;

/// An ioctl's number, of its directions, its type, its number within that, and the size of its argument in bytes
/// (`asm-generic/ioctl.h`).
const fn number(directions: u32, kind: u32, number: u32, size: usize) -> u64 {
    (directions << 30 | (size as u32) << 16 | kind << 8 | number) as u64
}

const fn io(kind: u32, nr: u32) -> u64 {
    number(0, kind, nr, 0)
}

/// The program writes `T` for the kernel.
const fn iow<T>(kind: u32, nr: u32) -> u64 {
    number(1, kind, nr, size_of::<T>())
}

/// The kernel writes `T` for the program.
const fn ior<T>(kind: u32, nr: u32) -> u64 {
    number(2, kind, nr, size_of::<T>())
}

const fn iowr<T>(kind: u32, nr: u32) -> u64 {
    number(3, kind, nr, size_of::<T>())
}

/// Runs a vCPU.
pub(super) const KVM_RUN: u64 = io(KVMIO, 0x80);

/// Turns a capability of a VM or of a vCPU on.
const KVM_ENABLE_CAP: u64 = iow::<kvm_enable_cap>(KVMIO, 0xa3);

/// Ioctls that describe KVM, and make VMs, their interrupt controllers and vCPUs.
pub(super) const KVM_CREATE: &[u64] = &[
    io(KVMIO, 0x00),                 // KVM_GET_API_VERSION
    io(KVMIO, 0x01),                 // KVM_CREATE_VM
    io(KVMIO, 0x03),                 // KVM_CHECK_EXTENSION
    io(KVMIO, 0x04),                 // KVM_GET_VCPU_MMAP_SIZE
    iowr::<kvm_cpuid2>(KVMIO, 0x05), // KVM_GET_SUPPORTED_CPUID
    io(KVMIO, 0x41),                 // KVM_CREATE_VCPU
    io(KVMIO, 0x47),                 // KVM_SET_TSS_ADDR
    iow::<u64>(KVMIO, 0x48),         // KVM_SET_IDENTITY_MAP_ADDR
    io(KVMIO, 0x60),                 // KVM_CREATE_IRQCHIP
    KVM_ENABLE_CAP,
];

/// Ioctls that set up a vCPU.
pub(super) const KVM_VCPU: &[u64] = &[
    ior::<kvm_regs>(KVMIO, 0x81),        // KVM_GET_REGS
    iow::<kvm_regs>(KVMIO, 0x82),        // KVM_SET_REGS
    ior::<kvm_sregs>(KVMIO, 0x83),       // KVM_GET_SREGS
    iow::<kvm_sregs>(KVMIO, 0x84),       // KVM_SET_SREGS
    iow::<kvm_msrs>(KVMIO, 0x89),        // KVM_SET_MSRS
    ior::<kvm_lapic_state>(KVMIO, 0x8e), // KVM_GET_LAPIC
    iow::<kvm_lapic_state>(KVMIO, 0x8f), // KVM_SET_LAPIC
    iow::<kvm_cpuid2>(KVMIO, 0x90),      // KVM_SET_CPUID2
    iow::<kvm_mp_state>(KVMIO, 0x99),    // KVM_SET_MP_STATE
    io(KVMIO, 0x9a),                     // KVM_NMI
    io(KVMIO, 0xad),                     // KVM_KVMCLOCK_CTRL
];

/// Ioctls that read and set the state of a VM that is saved or restored, and mask the PICs of a new one.
pub(super) const KVM_STATE: &[u64] = &[
    iowr::<kvm_msr_list>(KVMIO, 0x02),     // KVM_GET_MSR_INDEX_LIST
    iowr::<kvm_irqchip>(KVMIO, 0x62),      // KVM_GET_IRQCHIP
    ior::<kvm_irqchip>(KVMIO, 0x63),       // KVM_SET_IRQCHIP
    iow::<kvm_clock_data>(KVMIO, 0x7b),    // KVM_SET_CLOCK
    ior::<kvm_clock_data>(KVMIO, 0x7c),    // KVM_GET_CLOCK
    iowr::<kvm_msrs>(KVMIO, 0x88),         // KVM_GET_MSRS
    ior::<kvm_mp_state>(KVMIO, 0x98),      // KVM_GET_MP_STATE
    ior::<kvm_vcpu_events>(KVMIO, 0x9f),   // KVM_GET_VCPU_EVENTS
    iow::<kvm_vcpu_events>(KVMIO, 0xa0),   // KVM_SET_VCPU_EVENTS
    ior::<kvm_debugregs>(KVMIO, 0xa1),     // KVM_GET_DEBUGREGS
    iow::<kvm_debugregs>(KVMIO, 0xa2),     // KVM_SET_DEBUGREGS
    io(KVMIO, 0xa2),                       // KVM_SET_TSC_KHZ
    io(KVMIO, 0xa3),                       // KVM_GET_TSC_KHZ
    ior::<kvm_xsave>(KVMIO, 0xa4),         // KVM_GET_XSAVE
    iow::<kvm_xsave>(KVMIO, 0xa5),         // KVM_SET_XSAVE
    ior::<kvm_xcrs>(KVMIO, 0xa6),          // KVM_GET_XCRS
    iow::<kvm_xcrs>(KVMIO, 0xa7),          // KVM_SET_XCRS
    iowr::<kvm_nested_state>(KVMIO, 0xbe), // KVM_GET_NESTED_STATE
    iow::<kvm_nested_state>(KVMIO, 0xbf),  // KVM_SET_NESTED_STATE
    ior::<kvm_sregs2>(KVMIO, 0xcc),        // KVM_GET_SREGS2
    iow::<kvm_sregs2>(KVMIO, 0xcd),        // KVM_SET_SREGS2
    ior::<kvm_xsave>(KVMIO, 0xcf),         // KVM_GET_XSAVE2
    iow::<kvm_device_attr>(KVMIO, 0xe1),   // KVM_SET_DEVICE_ATTR
    iow::<kvm_device_attr>(KVMIO, 0xe2),   // KVM_GET_DEVICE_ATTR
];

/// Ioctls of KVM's log of vCPUs' writes to guest memory.
pub(super) const KVM_DIRTY_LOG: &[u64] = &[
    io(KVMIO, 0x03),                   // KVM_CHECK_EXTENSION
    iow::<kvm_dirty_log>(KVMIO, 0x42), // KVM_GET_DIRTY_LOG
    KVM_ENABLE_CAP,
    iowr::<kvm_clear_dirty_log>(KVMIO, 0xc0), // KVM_CLEAR_DIRTY_LOG
];

/// Sets a memory slot: `KVM_SET_USER_MEMORY_REGION`.
pub(super) const KVM_MEMORY_SLOT: u64 = iow::<kvm_userspace_memory_region>(KVMIO, 0x46);

/// Ioctls that connect devices to a VM: memory, doorbells, interrupts.
pub(super) const KVM_WIRES: &[u64] = &[
    KVM_MEMORY_SLOT,
    iow::<kvm_irq_routing>(KVMIO, 0x6a), // KVM_SET_GSI_ROUTING
    iow::<kvm_irqfd>(KVMIO, 0x76),       // KVM_IRQFD
    iow::<kvm_ioeventfd>(KVMIO, 0x79),   // KVM_IOEVENTFD
];

/// Rings of vhost devices, of any kind.
pub(super) const VHOST_RINGS: &[u64] = &[
    ior::<u64>(VHOST, 0x00),       // VHOST_GET_FEATURES
    iow::<u64>(VHOST, 0x00),       // VHOST_SET_FEATURES
    io(VHOST, 0x01),               // VHOST_SET_OWNER
    iow::<[u32; 2]>(VHOST, 0x10),  // VHOST_SET_VRING_NUM
    iow::<[u64; 5]>(VHOST, 0x11),  // VHOST_SET_VRING_ADDR
    iow::<[u32; 2]>(VHOST, 0x12),  // VHOST_SET_VRING_BASE
    iowr::<[u32; 2]>(VHOST, 0x12), // VHOST_GET_VRING_BASE
    iow::<[u32; 2]>(VHOST, 0x20),  // VHOST_SET_VRING_KICK
    iow::<[u32; 2]>(VHOST, 0x21),  // VHOST_SET_VRING_CALL
    iow::<[u32; 2]>(VHOST, 0x22),  // VHOST_SET_VRING_ERR
    iow::<u64>(VHOST, 0x25),       // VHOST_SET_BACKEND_FEATURES
    ior::<u64>(VHOST, 0x26),       // VHOST_GET_BACKEND_FEATURES
];

/// vhost-net.
pub(super) const VHOST_NET: &[u64] = &[
    iow::<u64>(VHOST, 0x03),      // VHOST_SET_MEM_TABLE
    iow::<u64>(VHOST, 0x04),      // VHOST_SET_LOG_BASE
    iow::<[u32; 2]>(VHOST, 0x30), // VHOST_NET_SET_BACKEND
];

/// Resets a vDPA device: `VHOST_VDPA_SET_STATUS`.
pub(super) const VDPA_STATUS: u64 = iow::<u8>(VHOST, 0x72);

/// vDPA devices.
pub(super) const VHOST_VDPA: &[u64] = &[
    ior::<u32>(VHOST, 0x70), // VHOST_VDPA_GET_DEVICE_ID
    ior::<u8>(VHOST, 0x71),  // VHOST_VDPA_GET_STATUS
    VDPA_STATUS,
    ior::<[u32; 2]>(VHOST, 0x73), // VHOST_VDPA_GET_CONFIG
    iow::<[u32; 2]>(VHOST, 0x74), // VHOST_VDPA_SET_CONFIG
    iow::<[u32; 2]>(VHOST, 0x75), // VHOST_VDPA_SET_VRING_ENABLE
    ior::<u16>(VHOST, 0x76),      // VHOST_VDPA_GET_VRING_NUM
    iow::<i32>(VHOST, 0x77),      // VHOST_VDPA_SET_CONFIG_CALL
    ior::<[u64; 2]>(VHOST, 0x78), // VHOST_VDPA_GET_IOVA_RANGE
    ior::<u32>(VHOST, 0x79),      // VHOST_VDPA_GET_CONFIG_SIZE
    io(VHOST, 0x7d),              // VHOST_VDPA_SUSPEND
    io(VHOST, 0x7e),              // VHOST_VDPA_RESUME
    ior::<u32>(VHOST, 0x80),      // VHOST_VDPA_GET_VQS_COUNT
];

/// Devices of the host: KVM's list of groups, groups, containers, and what a device is (`linux/vfio.h`).
pub(super) const VFIO: &[u64] = &[
    iowr::<kvm_create_device>(KVMIO, 0xe0), // KVM_CREATE_DEVICE
    iow::<kvm_device_attr>(KVMIO, 0xe1),    // KVM_SET_DEVICE_ATTR
    io(VFIO_KIND, 100),                     // VFIO_GET_API_VERSION
    io(VFIO_KIND, 101),                     // VFIO_CHECK_EXTENSION
    io(VFIO_KIND, 102),                     // VFIO_SET_IOMMU
    io(VFIO_KIND, 103),                     // VFIO_GROUP_GET_STATUS
    io(VFIO_KIND, 104),                     // VFIO_GROUP_SET_CONTAINER
    io(VFIO_KIND, 106),                     // VFIO_GROUP_GET_DEVICE_FD
    io(VFIO_KIND, 107),                     // VFIO_DEVICE_GET_INFO
    io(VFIO_KIND, 108),                     // VFIO_DEVICE_GET_REGION_INFO
    io(VFIO_KIND, 109),                     // VFIO_DEVICE_GET_IRQ_INFO
    io(VFIO_KIND, 112),                     // VFIO_IOMMU_GET_INFO
    io(VFIO_KIND, 118),                     // VFIO_DEVICE_BIND_IOMMUFD
    io(VFIO_KIND, 119),                     // VFIO_DEVICE_ATTACH_IOMMUFD_PT
    io(VFIO_KIND, 120),                     // VFIO_DEVICE_DETACH_IOMMUFD_PT
    io(VFIO_KIND, 128),                     // IOMMU_DESTROY
    io(VFIO_KIND, 129),                     // IOMMU_IOAS_ALLOC
    io(VFIO_KIND, 132),                     // IOMMU_IOAS_IOVA_RANGES
];

/// Ioctls that set which guest memory devices of the host reach. They follow from the requests of a guest with a
/// virtual IOMMU.
pub(super) const VFIO_DMA: &[u64] = &[
    io(VFIO_KIND, 113), // VFIO_IOMMU_MAP_DMA
    io(VFIO_KIND, 114), // VFIO_IOMMU_UNMAP_DMA
    io(VFIO_KIND, 131), // IOMMU_IOAS_COPY
    io(VFIO_KIND, 133), // IOMMU_IOAS_MAP
    io(VFIO_KIND, 134), // IOMMU_IOAS_UNMAP
];

/// Ioctls on a device of the host that a guest causes: interrupts and resets.
pub(super) const VFIO_DEVICE: &[u64] = &[
    io(VFIO_KIND, 110), // VFIO_DEVICE_SET_IRQS
    io(VFIO_KIND, 111), // VFIO_DEVICE_RESET
];

/// Queues of taps.
pub(super) const TAP_QUEUE: &[u64] = &[libc::TUNSETOFFLOAD as u64, libc::TUNSETQUEUE as u64, libc::TUNGETIFF as u64];

/// Taps, and the interfaces that they are on the host.
pub(super) const TAP: &[u64] = &[
    libc::TUNSETIFF as u64,
    libc::TUNSETVNETHDRSZ as u64,
    libc::SIOCGIFFLAGS as u64,
    libc::SIOCSIFFLAGS as u64,
    libc::SIOCGIFMTU as u64,
    libc::SIOCSIFMTU as u64,
    libc::SIOCGIFHWADDR as u64,
    libc::SIOCSIFHWADDR as u64,
    libc::SIOCGIFADDR as u64,
    libc::SIOCSIFADDR as u64,
    libc::SIOCGIFNETMASK as u64,
    libc::SIOCSIFNETMASK as u64,
    libc::SIOCGIFINDEX as u64,
    libc::SIOCETHTOOL as u64,
];

/// Block devices: the size of their blocks.
pub(super) const BLOCK_DEVICE: &[u64] = &[
    io(0x12, 104), // BLKSSZGET
    io(0x12, 123), // BLKPBSZGET
    0x8008_1272,   // BLKGETSIZE64
];

/// Ioctls that list the pages of this process.
pub(super) const PAGES: &[u64] = &[present::PAGEMAP_SCAN];

/// Has memory filled when it is used.
pub(super) const MAKE_USERFAULT: &[u64] = &[userfault::NEW, userfault::API, userfault::REGISTER];

/// Fills such memory.
pub(super) const USERFAULT: &[u64] = &[userfault::UNREGISTER, userfault::WAKE, userfault::COPY, userfault::ZEROPAGE];

/// Bytes that wait, and whether to wait for them.
pub(super) const STREAM: &[u64] = &[libc::FIONREAD as u64, libc::FIONBIO as u64];

/// Sets a terminal, as a panic does which puts it back.
pub(super) const SET_TERMINAL: &[u64] = &[
    libc::TCSETS as u64,
    0x402c_542b, // TCSETS2
];

/// Terminals: their settings, size and job; and making a pseudo-terminal.
pub(super) const TERMINAL: &[u64] = &[
    libc::TCGETS as u64,
    0x802c_542a, // TCGETS2
    libc::TIOCGPGRP as u64,
    libc::TIOCGWINSZ as u64,
    0x4004_5431, // TIOCSPTLCK
    0x8004_5430, // TIOCGPTN
    0x5441,      // TIOCGPTPEER
];
