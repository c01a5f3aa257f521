//! Offloads: work on a frame that its sender leaves to its receiver.

use bitflags::bitflags;

bitflags! {
    /// Checksum and segmentation offloads (`virtio 1.4 §5.1.3`), with the values of Linux's `TUNSETOFFLOAD`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Offloads: u32 {
        /// Frames without a TCP or UDP checksum.
        const CHECKSUM = libc::TUN_F_CSUM;
        /// TCP over IPv4 in one segment of up to 64 KiB.
        const TSO4 = libc::TUN_F_TSO4;
        /// TCP over IPv6 in one segment.
        const TSO6 = libc::TUN_F_TSO6;
        /// TCP segments with explicit congestion notification.
        const ECN = libc::TUN_F_TSO_ECN;
        /// UDP datagrams in one fragment.
        const UFO = libc::TUN_F_UFO;
        /// UDP datagrams over IPv4 in one segment.
        const USO4 = libc::TUN_F_USO4;
        /// UDP datagrams over IPv6 in one segment.
        const USO6 = libc::TUN_F_USO6;
    }
}
