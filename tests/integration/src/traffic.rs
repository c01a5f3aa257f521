//! Traffic between guests and the host, over NICs and over vsock devices.

pub(crate) mod announcements;
pub(crate) mod arp_traffic;
pub(crate) mod flood;
pub(crate) mod hybrid_socket;
pub(crate) mod pings;
pub(crate) mod probes;
pub(crate) mod stream;
pub(crate) mod tags;
pub(crate) mod transactions;
pub(crate) mod transfer;
pub(crate) mod vm_socket;
