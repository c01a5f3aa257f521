//! The numbers of the ioctls that filters allow: Linux's `include/uapi`.

#![allow(clippy::unnecessary_cast, reason = "types of constants differ between C libraries")]

use kvm_bindings::{
    KVMIO, kvm_cpuid2, kvm_ioeventfd, kvm_irq_routing, kvm_irqfd, kvm_lapic_state, kvm_mp_state, kvm_msrs, kvm_regs,
    kvm_sregs, kvm_userspace_memory_region,
};

/// The type of vhost's ioctls (`linux/vhost.h`).
const VHOST: u32 = 0xaf;

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

/// What describes KVM, and makes VMs, their interrupt controllers and vCPUs.
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
];

/// What sets a vCPU up.
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

/// What connects devices to a VM: memory, doorbells, interrupts.
pub(super) const KVM_WIRES: &[u64] = &[
    iow::<kvm_userspace_memory_region>(KVMIO, 0x46), // KVM_SET_USER_MEMORY_REGION
    iow::<kvm_irq_routing>(KVMIO, 0x6a),             // KVM_SET_GSI_ROUTING
    iow::<kvm_irqfd>(KVMIO, 0x76),                   // KVM_IRQFD
    iow::<kvm_ioeventfd>(KVMIO, 0x79),               // KVM_IOEVENTFD
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
    iow::<[u32; 2]>(VHOST, 0x30), // VHOST_NET_SET_BACKEND
];

/// vDPA devices.
pub(super) const VHOST_VDPA: &[u64] = &[
    ior::<u32>(VHOST, 0x70),      // VHOST_VDPA_GET_DEVICE_ID
    ior::<u8>(VHOST, 0x71),       // VHOST_VDPA_GET_STATUS
    iow::<u8>(VHOST, 0x72),       // VHOST_VDPA_SET_STATUS
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
