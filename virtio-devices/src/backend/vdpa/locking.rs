//! The limit of memory that a process may pin.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The memory that this process may pin, and the amount that it needs to pin, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Locking {
    /// The memory that it has pinned already, plus the guest's.
    pub needed: u64,
    /// The limit; `None` without one.
    pub limit: Option<u64>,
}

impl Locking {
    /// Computes the need for pinning `size` more bytes, for one more device: each device's pages count. Raises the
    /// limit as far as this process may. `counted` is the kernel's counter in a process's status: `VmPin:` for vDPA
    /// devices, `VmLck:` for VFIO.
    pub fn reserve(size: u64, counted: &str) -> Self {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let needed = size.saturating_add(pinned(&status, counted));
        let limits = getrlimit(Resource::Memlock);
        if limits.current.is_some_and(|limit| limit < needed) {
            // If that is forbidden, mapping the memory fails.
            let _ = setrlimit(Resource::Memlock, Rlimit { current: limits.maximum, maximum: limits.maximum });
        }
        Self { needed, limit: getrlimit(Resource::Memlock).current }
    }

    /// True if the limit is too low.
    pub fn falls_short(&self) -> bool {
        self.limit.is_some_and(|limit| limit < self.needed)
    }
}

/// The memory that a process has pinned, in bytes, according to its `/proc/self/status`.
fn pinned(status: &str, counted: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix(counted));
    let kibibytes = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse().ok());
    kibibytes.unwrap_or(0_u64).saturating_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pinned_memory_is_read_in_kibibytes() {
        let status = "VmLck:\t       1 kB\nVmPin:\t  262144 kB\nVmHWM:\t 1 kB\n";
        assert_eq!((pinned(status, "VmPin:"), pinned(status, "VmLck:")), (256 << 20, 1024));
        assert_eq!(pinned("", "VmPin:"), 0);
    }

    #[test]
    fn a_limit_falls_short_of_more_than_it_allows() {
        let locking = |needed, limit| Locking { needed, limit }.falls_short();
        assert!(!locking(1, None) && !locking(8, Some(8)) && locking(9, Some(8)));
    }
}
