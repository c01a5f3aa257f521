//! System calls that each kind of thread may make (Linux, `Documentation/userspace-api/seccomp_filter.rst`).
//!
//! A filter belongs to a thread and those that it starts. It cannot be removed, and a further filter only restricts
//! more. So the starter of all threads may make all calls that any of them may, and each other thread starts by adding
//! the filter of its kind. The allowed calls of all kinds are in one list, [`lists`], with reasons.
//!
//! A filter sees a call's number and arguments, but not the memory that they point to: an ioctl's request, but no path.
//! Paths are restricted by Landlock.

mod ioctls;
mod lists;
mod names;
mod report;
mod rule;
#[cfg(test)]
mod tests;
mod violation;

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use libc::{ENOSYS, EPERM};
use seccompiler::{BackendError, BpfProgram, SeccompAction, SeccompFilter, TargetArch};

use crate::heap;
use crate::threads::{self, ThreadKind};

/// Action at a system call that a thread may not make: `--seccomp`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Seccomp {
    /// Reported with the name of the call; the program ends with SIGSYS.
    #[default]
    True,
    /// Allowed: no filters are installed.
    False,
    /// Allowed, and written to the kernel's audit log.
    Log,
    /// Fails with EPERM.
    Errno,
}

impl Seccomp {
    /// Action of the kernel.
    fn action(self) -> Option<SeccompAction> {
        match self {
            Self::True => Some(SeccompAction::Trap),
            Self::False => None,
            Self::Log => Some(SeccompAction::Log),
            Self::Errno => Some(SeccompAction::Errno(EPERM.cast_unsigned())),
        }
    }
}

/// The filters of all kinds of threads: one for each kind, and a second one for the starter.
struct Filters(BTreeMap<ThreadKind, Vec<BpfProgram>>);

impl Filters {
    fn new(action: &SeccompAction) -> Result<Self, BackendError> {
        let kinds = [ThreadKind::Main, ThreadKind::Starter].into_iter().chain(ThreadKind::started());
        let filters = kinds.map(|kind| {
            let rules = rule::rules(lists::groups(kind))?;
            let own = SeccompFilter::new(rules, action.clone(), SeccompAction::Allow, ARCHITECTURE)?.try_into()?;
            let before = if kind == ThreadKind::Starter { Some(without_clone3()?) } else { None };
            Ok((kind, before.into_iter().chain([own]).collect()))
        });
        Ok(Self(filters.collect::<Result<_, BackendError>>()?))
    }

    /// Installs the filter of `kind` for the calling thread.
    fn enter(&self, kind: ThreadKind) -> io::Result<()> {
        let filters = self.0.get(&kind).into_iter().flatten();
        filters.into_iter().try_for_each(|filter| seccompiler::apply_filter(filter).map_err(io::Error::other))
    }
}

#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: TargetArch = TargetArch::x86_64;

/// System calls that threads of a kind may make for one reason, possibly with some arguments only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allowance {
    /// The kind of thread, such as `Vcpu` or `Worker(Net)`.
    pub thread: String,
    /// The reason.
    pub why: &'static str,
    /// The names of the calls.
    pub calls: Vec<&'static str>,
}

/// The name of a system call, as in manual pages.
pub fn call_name(number: i64) -> Option<&'static str> {
    names::name(number)
}

/// Allowances of all kinds of threads except the starter, which may make all calls that any of them may, and create
/// threads.
pub fn allowances() -> impl Iterator<Item = Allowance> {
    std::iter::once(ThreadKind::Main).chain(ThreadKind::started()).flat_map(|kind| {
        lists::groups(kind).into_iter().map(move |group| Allowance {
            thread: format!("{kind:?}"),
            why: group.why,
            calls: group.rules.iter().filter_map(|rule| names::name(rule.call)).collect(),
        })
    })
}

/// Makes `clone3` fail as in a kernel without it. Its flags are in memory, where a filter cannot see if the call
/// creates a thread or a process. The C library then uses `clone`.
fn without_clone3() -> Result<BpfProgram, BackendError> {
    let clone3 = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    let fails = SeccompAction::Errno(ENOSYS.cast_unsigned());
    SeccompFilter::new(clone3, SeccompAction::Allow, fails, ARCHITECTURE)?.try_into()
}

/// Installs the filter of the control thread, which is the calling thread. Before that, starts the starter of all other
/// threads, with its own filter.
///
/// # Errors
///
/// Fails if the kernel has no filters, or no thread can be started.
pub(crate) fn begin(mode: Seccomp) -> io::Result<()> {
    let Some(action) = mode.action() else { return threads::begin(Arc::new(|_| Ok(()))) };
    let filters = Arc::new(Filters::new(&action).map_err(io::Error::other)?);
    if mode == Seccomp::True {
        violation::report()?;
    }
    report::without_files();
    let of_others = Arc::clone(&filters);
    let prepare = move |kind| {
        if kind == ThreadKind::Starter {
            heap::look();
        }
        of_others.enter(kind)
    };
    threads::begin(Arc::new(prepare))?;
    filters.enter(ThreadKind::Main)
}
