//! Reasons why the guest's memory cannot be allocated or cleared.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::config::bytes;

/// Reason why the guest's memory cannot be allocated or cleared.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// The size is not a whole number of pages.
    #[error(
        "--memory {key}={}: not a multiple of the page size; make it a multiple of {}",
        bytes(*.size), bytes(*.page)
    )]
    Unaligned {
        /// The key that asked for it.
        key: &'static str,
        /// The size asked for, in bytes.
        size: u64,
        /// The page size, in bytes.
        page: u64,
    },
    /// The host has no huge pages of this size.
    #[error(
        "--memory hugepage_size={}: the host has no huge pages of this size; /sys/kernel/mm/hugepages lists its sizes",
        bytes(*.0)
    )]
    HugePageSize(u64),
    /// The host has too few free huge pages.
    #[error(
        "--memory {key}={},hugepages=on: the host has too few free huge pages; {needed} of {} are needed, see \
         /proc/sys/vm/nr_hugepages",
        bytes(*.size),
        bytes(*.page)
    )]
    HugePages {
        /// The key that asked for them.
        key: &'static str,
        /// The size asked for, in bytes.
        size: u64,
        /// The size of a huge page, in bytes.
        page: u64,
        /// Number that is needed.
        needed: u64,
    },
    /// The host's kernel does not merge pages.
    #[error("--memory mergeable=on: the host's kernel does not merge pages (CONFIG_KSM); leave it out")]
    Merge,
    /// Swap space cannot be set aside for shared memory.
    #[error(
        "--memory reserve=on: the host sets no swap space aside for shared memory; use \
         prefault=on, or leave reserve out"
    )]
    ReserveShared,
    /// A zone cannot be allocated.
    #[error("--memory-zone id={id},{}", error.to_string().trim_start_matches("--memory "))]
    Zone {
        /// Name of the zone.
        id: String,
        /// Cause.
        error: Box<Self>,
    },
    /// The file of a zone cannot be used.
    #[error("--memory file={}: {problem}", path.display())]
    File {
        /// The file or directory.
        path: PathBuf,
        /// Fault, and remedy.
        problem: String,
    },
    /// The host has no such NUMA node, or its pages cannot be had.
    #[error(
        "--memory host_numa_node={node}: the host does not give memory of this node: {error}; \
         see /sys/devices/system/node"
    )]
    Node {
        /// The node's number.
        node: u32,
        /// Cause.
        error: io::Error,
    },
    /// The host cannot allocate the memory.
    #[error("--memory {key}={}: the host cannot allocate the memory: {error}; give less", bytes(*.size))]
    Map {
        /// The key that asked for it.
        key: &'static str,
        /// The size asked for, in bytes.
        size: u64,
        /// Cause.
        error: io::Error,
    },
    /// Another program's memory could be made shorter by it.
    #[error(
        "the source passes memory that it could make shorter: its size is not sealed (F_SEAL_SHRINK), and it is not \
         the file of the zone here"
    )]
    Unsealed,
    /// The memory cannot be cleared for a reboot.
    #[error("cannot clear the guest's memory: {0}")]
    Clear(io::Error),
}
