//! System calls that each kind of thread may make (Linux, `Documentation/userspace-api/seccomp_filter.rst`).
//!
//! A filter belongs to a thread and those that it starts. It cannot be taken away, and a further one only takes more.
//! So the starter of all threads has what any of them may do, and each other thread begins by adding the filter of its
//! kind. What a filter lets through is one list for all kinds, [`lists`], with the reasons.
//!
//! A filter sees a call's number and arguments, but not the memory that they point to: it knows an ioctl's request, but
//! no path. Paths are Landlock's.

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
    /// The program says which call it was, and ends by SIGSYS.
    #[default]
    True,
    /// It is made: there are no filters.
    False,
    /// It is made, and the kernel's audit log tells of it.
    Log,
    /// It fails with EPERM.
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

/// The filters of all kinds of threads. Each kind has one; the starter has another before it.
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

    /// Puts the calling thread, which is of this kind, under its filter.
    fn enter(&self, kind: ThreadKind) -> io::Result<()> {
        let filters = self.0.get(&kind).into_iter().flatten();
        filters.into_iter().try_for_each(|filter| seccompiler::apply_filter(filter).map_err(io::Error::other))
    }
}

#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: TargetArch = TargetArch::x86_64;

/// System calls that threads of a kind may make for one reason. They may make them with some arguments only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allowance {
    /// The kind of thread, such as `Vcpu` or `Worker(Net)`.
    pub thread: String,
    /// The reason.
    pub why: &'static str,
    /// The names of the calls.
    pub calls: Vec<&'static str>,
}

/// The name of a system call, as manual pages have it.
pub fn call_name(number: i64) -> Option<&'static str> {
    names::name(number)
}

/// Allowances of all kinds of threads except the starter, which may do all that any of them may, and make threads.
pub fn allowances() -> impl Iterator<Item = Allowance> {
    std::iter::once(ThreadKind::Main).chain(ThreadKind::started()).flat_map(|kind| {
        lists::groups(kind).into_iter().map(move |group| Allowance {
            thread: format!("{kind:?}"),
            why: group.why,
            calls: group.rules.iter().filter_map(|rule| names::name(rule.call)).collect(),
        })
    })
}

/// Has `clone3` fail as in a kernel that does not have it. Its flags are in memory, where a filter does not see whether
/// it makes a thread or a process. The C library then uses `clone`.
fn without_clone3() -> Result<BpfProgram, BackendError> {
    let clone3 = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    let fails = SeccompAction::Errno(ENOSYS.cast_unsigned());
    SeccompFilter::new(clone3, SeccompAction::Allow, fails, ARCHITECTURE)?.try_into()
}

/// Puts the calling thread, the control thread, under its filter, and before that starts the starter of all others,
/// under its own.
///
/// # Errors
///
/// The kernel has no filters, or no thread is left.
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
