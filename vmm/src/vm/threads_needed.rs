//! The threads that a VM may need, and their memory mappings.

use crate::config::DevicePlan;
use crate::devices::kind;
use crate::vm::error::VmError;

/// Threads other than those of devices and vCPUs: those of the API, of events and consoles, the control thread and its
/// openers, and the kernel's for KVM.
const OTHERS: u64 = 32;

/// Mappings of a thread: its stack, the guard below it, and one that its device may have (a ring of a disk, memory of a
/// vhost-user backend, a vCPU's registers).
const OF_THREAD: u64 = 3;
/// Mappings of the program itself: its code, libraries, heaps, guest memory and configuration space.
const OF_PROGRAM: u64 = 1024;

/// The most threads and memory mappings that this process may have; `None` if unknown, which is no limit.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ThreadLimits {
    /// The most threads, and the command that raises it.
    pub threads: Option<(u64, &'static str)>,
    /// The most memory mappings (`vm.max_map_count`).
    pub mappings: Option<u64>,
}

/// Checks that the process may have as many threads and mappings as a VM with these devices and vCPUs may need.
///
/// # Errors
///
/// Fails with [`VmError::Threads`] or [`VmError::Mappings`].
pub(super) fn check<'a>(
    devices: impl IntoIterator<Item = &'a DevicePlan>,
    vcpus: u32,
    limits: &ThreadLimits,
) -> Result<(), VmError> {
    let devices: Vec<_> = devices.into_iter().collect();
    let has_vfs = devices.iter().any(|device| device.total_vfs() > 0);
    let threads = OTHERS + u64::from(vcpus) + devices.iter().copied().map(kind::threads).sum::<u64>();
    if let Some((limit, raise)) = limits.threads
        && limit < threads
    {
        return Err(VmError::Threads { needed: threads, limit, has_vfs, raise });
    }
    let needed = OF_PROGRAM + threads * OF_THREAD;
    match limits.mappings {
        Some(limit) if limit < needed => Err(VmError::Mappings { needed, limit, has_vfs }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::mpsc;

    use super::*;
    use crate::config::{VmConfig, VmPlan};
    use crate::threads::{self, ThreadKind};
    use virtio_devices::NewThread;

    fn check_with(nets: &[&str], limits: ThreadLimits) -> Result<(), String> {
        let mut config = VmConfig { net: nets.iter().map(|net| net.parse().unwrap()).collect(), ..VmConfig::default() };
        config.payload.kernel = Some("vmlinux".into());
        config.cpus.boot_vcpus = 4;
        config.cpus.max_vcpus = 4;
        let plan = VmPlan::of(&config).unwrap();
        check(&plan.devices, 4, &limits).map_err(|error| error.to_string())
    }

    #[test]
    fn vm_whose_vfs_exceed_host_threads_or_mappings_is_refused() {
        let (free, raise) = (ThreadLimits::default(), "ulimit -u");
        // One for the PF and each VF, one for the console and one for the entropy device.
        let threads = OTHERS + 4 + 64 + 2;
        let with = |threads, mappings| ThreadLimits { threads, mappings };
        let nets = ["sriov_vfs=63"];
        assert_eq!(check_with(&nets, free), Ok(()));
        assert_eq!(check_with(&nets, with(Some((threads, raise)), Some(OF_PROGRAM + 3 * threads))), Ok(()));
        let refused = check_with(&nets, with(Some((threads - 1, raise)), None)).unwrap_err();
        assert_eq!(
            refused,
            "this VM needs up to 102 threads, and the limit is 101; raise it (ulimit -u), or reserve fewer VFs"
        );
        let refused = check_with(&nets, with(None, Some(OF_PROGRAM + 3 * threads - 1))).unwrap_err();
        assert!(refused.contains("up to 1330 memory mappings, and the limit is 1329"), "{refused}");
        assert!(refused.contains("sysctl vm.max_map_count=1330"), "{refused}");
        let refused = check_with(&[], with(Some((8, raise)), None)).unwrap_err();
        assert!(refused.ends_with("and the limit is 8; raise it (ulimit -u)"), "{refused}");
        // Each pair has a thread if this program moves the frames, or else a kernel worker.
        let exact = |pairs| with(Some((OTHERS + 4 + 2 + pairs, raise)), None);
        for (net, needed) in [("num_queues=8", 4), ("num_queues=8,vhost=on", 5), ("vhost_user=on,socket=/s", 1)] {
            assert_eq!(check_with(&[net], exact(needed)), Ok(()), "{net}");
            assert!(check_with(&[net], exact(needed - 1)).is_err(), "{net}");
        }
    }

    /// The mappings that `threads` threads add to this process.
    fn mappings_of(threads: u64) -> u64 {
        let mappings = || fs::read_to_string("/proc/self/maps").unwrap().lines().count() as u64;
        let (before, (begun, begin)) = (mappings(), mpsc::channel());
        let (mut ends, mut running) = (Vec::new(), Vec::new());
        for _ in 0..threads {
            let (end, ended) = mpsc::channel::<()>();
            let begun = begun.clone();
            let work = move || {
                begun.send(Box::new([1_u8; 4096])).unwrap();
                let _ = ended.recv();
            };
            let thread = NewThread::new("test", 128 << 10, work);
            running.push(threads::start(ThreadKind::Serial, thread).unwrap());
            ends.push(end);
        }
        let all: Vec<_> = begin.iter().take(threads as usize).collect();
        assert_eq!(all.len(), threads as usize);
        let grown = mappings().saturating_sub(before);
        drop(ends);
        running.into_iter().for_each(|thread| thread.join().unwrap());
        grown
    }

    #[test]
    fn a_thread_has_no_more_mappings_than_are_reckoned() {
        let threads = 64;
        // Each of the C library's heaps may be split in two. Other tests map memory in the meantime, but not each time.
        let grown = (0..5).map(|_| mappings_of(threads)).min().unwrap();
        assert!(grown <= threads * OF_THREAD + 128, "{grown} mappings for {threads} threads");
    }
}
