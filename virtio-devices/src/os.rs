//! Resources of the host's operating system: threads, eventfds, files, sockets, terminals and clocks.

pub(crate) mod chardev;
pub(crate) mod clock;
pub(crate) mod error_kind;
pub(crate) mod eventfd;
pub(crate) mod new_file;
pub(crate) mod socket_path;
pub(crate) mod thread;
pub(crate) mod unmade_file;
