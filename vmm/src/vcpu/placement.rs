//! Where the threads of vCPUs run: the CPUs of the host that each may use, and what may run on the other threads of the
//! same core (Linux's `Documentation/admin-guide/hw-vuln/core-scheduling.rst`).

use std::collections::BTreeMap;
use std::io;

use rustix::io::Errno;
use rustix::process::Pid;
use rustix::thread::{
    CoreSchedulingScope, CpuSet, create_core_scheduling_cookie, gettid, pull_core_scheduling_cookie, sched_setaffinity,
};
use thiserror::Error;
use vm_api::config::{CoreScheduling, CpusConfig};

use crate::config::cpus::HOST_CPUS;

const _: () = assert!(HOST_CPUS as usize == CpuSet::MAX_CPU);

/// The kernel's answer without core scheduling.
const NO_CORE_SCHEDULING: Errno = Errno::INVAL;
/// The kernel's answer on a host whose cores have one thread each, where nothing is shared.
const NO_SHARED_CORES: Errno = Errno::NODEV;

/// Why a thread cannot run where it should.
#[derive(Debug, Error)]
pub enum PlacementError {
    /// The host has none of the CPUs, or this process may not use them.
    #[error("--cpus affinity: this process can run on none of the CPUs given ({0}); give others")]
    Affinity(io::Error),
    /// The kernel cannot keep other threads away.
    #[error(
        "--cpus core_scheduling=vcpu: the host's kernel has no core scheduling (CONFIG_SCHED_CORE), and its cores have \
         several threads; give core_scheduling=off"
    )]
    NoCoreScheduling,
    /// The kernel refuses to keep other threads away.
    #[error("--cpus core_scheduling: the host's kernel refuses it ({0}); give core_scheduling=off")]
    CoreScheduling(io::Error),
}

/// Where the threads of a VM's vCPUs run. By default anywhere.
#[derive(Debug)]
pub struct Placement {
    affinity: BTreeMap<u32, CpuSet>,
    core_scheduling: CoreScheduling,
    /// Whether a core of the host may have several threads. A vCPU's thread could not open the file that says it.
    shares_cores: bool,
}

impl Default for Placement {
    fn default() -> Self {
        Self { affinity: BTreeMap::new(), core_scheduling: CoreScheduling::Off, shares_cores: true }
    }
}

impl Placement {
    /// That of a configuration.
    pub fn of(cpus: &CpusConfig) -> Self {
        let set = |host_cpus: &[u32]| {
            let mut set = CpuSet::new();
            host_cpus.iter().filter(|cpu| **cpu < HOST_CPUS).for_each(|cpu| set.set(*cpu as usize));
            set
        };
        let affinity = cpus.affinity.iter().map(|affinity| (affinity.vcpu, set(&affinity.host_cpus))).collect();
        Self { affinity, core_scheduling: cpus.core_scheduling, shares_cores: shares_cores() }
    }

    /// Places the calling thread, which is about to run vCPU `id`, and returns its ID. `first` is the thread of vCPU 0,
    /// which is placed before all others.
    ///
    /// # Errors
    ///
    /// It cannot run there.
    pub(crate) fn enter(&self, id: u32, first: Option<Pid>) -> Result<Pid, PlacementError> {
        let thread = gettid();
        if let Some(set) = self.affinity.get(&id) {
            sched_setaffinity(None, set).map_err(|error| PlacementError::Affinity(error.into()))?;
        }
        let scope = CoreSchedulingScope::Thread;
        let entered = match (self.core_scheduling, first) {
            (CoreScheduling::Off, _) => Ok(()),
            (CoreScheduling::Vm, Some(first)) if id != 0 => match pull_core_scheduling_cookie(first, scope) {
                // The guest has stopped, and so will this vCPU.
                Err(Errno::SRCH) => Ok(()),
                entered => entered,
            },
            (CoreScheduling::Vm | CoreScheduling::Vcpu, _) => create_core_scheduling_cookie(thread, scope),
        };
        match (entered, self.core_scheduling) {
            (Ok(()) | Err(NO_SHARED_CORES), _) => {}
            (Err(NO_CORE_SCHEDULING), _) if !self.shares_cores => {}
            (Err(NO_CORE_SCHEDULING), CoreScheduling::Vcpu) => return Err(PlacementError::NoCoreScheduling),
            // It is the default, and most hosts without it are used as they always were.
            (Err(NO_CORE_SCHEDULING), _) if id == 0 => log::warn!(
                "--cpus core_scheduling=vm: the host's kernel has no core scheduling (CONFIG_SCHED_CORE), so other \
                 programs may run on the same cores as vCPUs; core_scheduling=off says that this is intended"
            ),
            (Err(NO_CORE_SCHEDULING), _) => {}
            (Err(error), _) => return Err(PlacementError::CoreScheduling(error.into())),
        }
        Ok(thread)
    }
}

/// Whether a core of the host may have several threads.
fn shares_cores() -> bool {
    std::fs::read_to_string("/sys/devices/system/cpu/smt/active").map_or(true, |active| active.trim() != "0")
}

#[cfg(test)]
mod tests {
    use rustix::thread::{core_scheduling_cookie, sched_getaffinity};

    use super::*;

    fn placed<T: Send>(text: &str, id: u32, first: Option<Pid>, look: impl Fn(Pid) -> T + Sync) -> Result<T, String> {
        let placement = Placement::of(&text.parse().unwrap());
        let thread = || placement.enter(id, first).map(&look).map_err(|error| error.to_string());
        std::thread::scope(|scope| scope.spawn(thread).join().unwrap())
    }

    #[test]
    fn a_vcpu_runs_on_its_cpus_and_the_others_anywhere() {
        let all = sched_getaffinity(None).unwrap();
        let cpu = (0..CpuSet::MAX_CPU).find(|cpu| all.is_set(*cpu)).unwrap();
        let cpus = |id| {
            let text = format!("boot=3,affinity=[1@[{cpu}],2@[1023]]");
            placed(&text, id, None, |_| sched_getaffinity(None).unwrap())
        };
        let mut one = CpuSet::new();
        one.set(cpu);
        assert_eq!((cpus(0), cpus(1)), (Ok(all), Ok(one)));
        assert!(cpus(2).unwrap_err().starts_with("--cpus affinity: this process can run on none of the CPUs given"));
        assert_eq!(sched_getaffinity(None), Ok(all));
    }

    /// What a host's kernel cannot do is checked with its own answer.
    #[test]
    fn vcpus_share_a_cookie_with_their_vm_or_with_none() {
        let scope = CoreSchedulingScope::Thread;
        let own = core_scheduling_cookie(gettid(), scope);
        let cookie = |thread| core_scheduling_cookie(thread, scope);
        assert_eq!(placed("core_scheduling=off", 0, None, cookie), Ok(own));
        let possible = create_core_scheduling_cookie_of_a_thread();
        for (text, shared) in [("boot=2", true), ("boot=2,core_scheduling=vcpu", false)] {
            let both = placed(text, 0, None, |first| (cookie(first), placed(text, 1, Some(first), cookie)));
            match possible {
                Ok(()) => {
                    let (first, second) = both.unwrap();
                    assert_ne!(first, own);
                    assert_eq!(second.unwrap() == first, shared);
                }
                Err(error) if shared || !shares_cores() || error == NO_SHARED_CORES => {
                    assert_eq!(both.unwrap().1, Ok(own));
                }
                Err(_) => assert!(both.unwrap_err().contains("has no core scheduling")),
            }
        }
    }

    fn create_core_scheduling_cookie_of_a_thread() -> Result<(), Errno> {
        std::thread::spawn(|| create_core_scheduling_cookie(gettid(), CoreSchedulingScope::Thread)).join().unwrap()
    }

    #[test]
    fn a_first_vcpu_that_has_ended_stops_no_other() {
        let gone = std::thread::spawn(gettid).join().unwrap();
        assert!(placed("boot=2", 1, Some(gone), drop).is_ok());
    }
}
