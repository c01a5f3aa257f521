//! Placement of vCPU threads: the host CPUs that each may use, and the threads that may share its core (Linux's
//! `Documentation/admin-guide/hw-vuln/core-scheduling.rst`).

use std::collections::BTreeMap;
use std::io;

use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_setaffinity};
use thiserror::Error;
use vm_api::config::{CoreScheduling, CpusConfig};

use crate::config::cpus::HOST_CPUS;
use crate::threads::{core_group, group_vcpus};

const _: () = assert!(HOST_CPUS as usize == CpuSet::MAX_CPU);

/// Error of a kernel without core scheduling.
const NO_CORE_SCHEDULING: Errno = Errno::INVAL;
/// Error of a host whose cores have one thread each, so that nothing is shared.
const NO_SHARED_CORES: Errno = Errno::NODEV;

/// Failure to place a thread.
#[derive(Debug, Error)]
pub enum PlacementError {
    /// The host lacks all of the CPUs, or this process may not use them.
    #[error("--cpus affinity: this process can run on none of the CPUs given ({0}); give others")]
    Affinity(io::Error),
    /// The kernel cannot isolate the vCPU's core.
    #[error(
        "--cpus core_scheduling=vcpu: the host's kernel has no core scheduling (CONFIG_SCHED_CORE), and its cores have \
         several threads; give core_scheduling=off"
    )]
    NoCoreScheduling,
    /// The kernel refuses to isolate the vCPU's core.
    #[error("--cpus core_scheduling: the host's kernel refuses it ({0}); give core_scheduling=off")]
    CoreScheduling(io::Error),
}

/// Placement of a VM's vCPU threads. By default they run anywhere.
#[derive(Debug)]
pub struct Placement {
    affinity: BTreeMap<u32, CpuSet>,
    core_scheduling: CoreScheduling,
    /// True if a core of the host may have several threads. Read early, because a vCPU's thread cannot open the file.
    shares_cores: bool,
}

impl Default for Placement {
    fn default() -> Self {
        Self { affinity: BTreeMap::new(), core_scheduling: CoreScheduling::Off, shares_cores: true }
    }
}

impl Placement {
    /// Returns the placement of a configuration.
    pub fn of(cpus: &CpusConfig) -> Self {
        let set = |host_cpus: &[u32]| {
            let mut set = CpuSet::new();
            host_cpus.iter().filter(|cpu| **cpu < HOST_CPUS).for_each(|cpu| set.set(*cpu as usize));
            set
        };
        let affinity = cpus.affinity.iter().map(|affinity| (affinity.vcpu, set(&affinity.host_cpus))).collect();
        Self { affinity, core_scheduling: cpus.core_scheduling, shares_cores: shares_cores() }
    }

    /// Prepares for starting vCPU threads, which start in the VM's group if there is one.
    ///
    /// # Errors
    ///
    /// Fails if the kernel refuses the group.
    pub(crate) fn begin(&self) -> Result<(), PlacementError> {
        let grouped = group_vcpus(self.core_scheduling == CoreScheduling::Vm);
        if grouped == Err(NO_CORE_SCHEDULING) && self.shares_cores {
            // Only a warning: this is the default, and most hosts without core scheduling run as before.
            log::warn!(
                "--cpus core_scheduling=vm: the host's kernel has no core scheduling (CONFIG_SCHED_CORE), so other \
                 programs may run on the same cores as vCPUs; core_scheduling=off says that this is intended"
            );
            return Ok(());
        }
        self.judge(grouped)
    }

    /// Places the calling thread, which will run vCPU `id` and was started after [`Self::begin`].
    ///
    /// # Errors
    ///
    /// Fails if the thread cannot run there.
    pub(crate) fn enter(&self, id: u32) -> Result<(), PlacementError> {
        if let Some(set) = self.affinity.get(&id) {
            sched_setaffinity(None, set).map_err(|error| PlacementError::Affinity(error.into()))?;
        }
        match self.core_scheduling {
            CoreScheduling::Off | CoreScheduling::Vm => Ok(()),
            CoreScheduling::Vcpu => self.judge(core_group::create()),
        }
    }

    /// Converts the kernel's result to an error, except where no core is shared.
    fn judge(&self, entered: Result<(), Errno>) -> Result<(), PlacementError> {
        match entered {
            Ok(()) | Err(NO_SHARED_CORES) => Ok(()),
            Err(NO_CORE_SCHEDULING) if !self.shares_cores => Ok(()),
            Err(NO_CORE_SCHEDULING) => Err(PlacementError::NoCoreScheduling),
            Err(error) => Err(PlacementError::CoreScheduling(error.into())),
        }
    }
}

/// True if a core of the host may have several threads.
fn shares_cores() -> bool {
    std::fs::read_to_string("/sys/devices/system/cpu/smt/active").map_or(true, |active| active.trim() != "0")
}

#[cfg(test)]
mod tests {
    use rustix::thread::{CoreSchedulingScope, core_scheduling_cookie, gettid, sched_getaffinity};

    use super::*;

    fn placed<T: Send>(text: &str, id: u32, look: impl Fn() -> T + Sync) -> Result<T, String> {
        let placement = Placement::of(&text.parse().unwrap());
        let thread = || placement.enter(id).map(|()| look()).map_err(|error| error.to_string());
        std::thread::scope(|scope| scope.spawn(thread).join().unwrap())
    }

    #[test]
    fn a_vcpu_runs_on_its_cpus_and_the_others_anywhere() {
        let all = sched_getaffinity(None).unwrap();
        let cpu = (0..CpuSet::MAX_CPU).find(|cpu| all.is_set(*cpu)).unwrap();
        let cpus = |id| {
            let text = format!("boot=3,affinity=[1@[{cpu}],2@[1023]]");
            placed(&text, id, || sched_getaffinity(None).unwrap())
        };
        let mut one = CpuSet::new();
        one.set(cpu);
        assert_eq!((cpus(0), cpus(1)), (Ok(all), Ok(one)));
        assert!(cpus(2).unwrap_err().starts_with("--cpus affinity: this process can run on none of the CPUs given"));
        assert_eq!(sched_getaffinity(None), Ok(all));
    }

    /// On a host without support, the expected result is its own error.
    #[test]
    fn a_vcpu_of_its_own_core_shares_it_with_none() {
        let cookie = || core_scheduling_cookie(gettid(), CoreSchedulingScope::Thread);
        let own = cookie();
        for text in ["core_scheduling=off", "core_scheduling=vm"] {
            assert_eq!(placed(text, 0, cookie), Ok(own), "{text}: nothing is done in the vCPU's thread");
        }
        let of = |id| placed("boot=2,core_scheduling=vcpu", id, cookie);
        match std::thread::spawn(core_group::create).join().unwrap() {
            Ok(()) => {
                let (first, second) = (of(0).unwrap(), of(1).unwrap());
                assert!(first != own && second != own);
            }
            Err(error) if !shares_cores() || error == NO_SHARED_CORES => assert_eq!(of(0), Ok(own)),
            Err(_) => assert!(of(0).unwrap_err().contains("has no core scheduling")),
        }
    }

    #[test]
    fn a_kernels_refusal_is_an_error_where_cores_are_shared() {
        let judge = |shares_cores, entered| {
            let placement = Placement { shares_cores, ..Placement::default() };
            placement.judge(entered).map_err(|error| error.to_string())
        };
        for shared in [false, true] {
            assert_eq!(judge(shared, Ok(())), Ok(()));
            assert_eq!(judge(shared, Err(NO_SHARED_CORES)), Ok(()));
            assert!(judge(shared, Err(Errno::NOMEM)).unwrap_err().contains("refuses it"));
        }
        assert_eq!(judge(false, Err(NO_CORE_SCHEDULING)), Ok(()));
        assert!(judge(true, Err(NO_CORE_SCHEDULING)).unwrap_err().contains("has no core scheduling"));
    }
}
