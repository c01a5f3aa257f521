//! Landlock: the files that this process may use, and no others (Linux, `Documentation/userspace-api/landlock.rst`).
//!
//! A thread confines itself and the threads that it starts from then on, for good. The control thread does so when a VM
//! asks for it, before it opens anything of that VM. Threads that run already when a VM is created either open nothing
//! and begin by [`isolation`], or [`follow`] before they start a thread of the VM.
//!
//! Beside files, the kernel refuses TCP (from Linux 6.7 on), and abstract sockets and signals of other processes (from
//! 6.12 on). It does not look at connections to sockets that have a path.

mod error;
mod granted;
mod host_file;
mod named;
mod rule;
#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use landlock::{
    ABI, Access as _, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible as _, Erratum, PathBeneath, PathFd,
    RestrictionStatus, Ruleset, RulesetAttr as _, RulesetCreated, RulesetCreatedAttr as _, RulesetStatus, Scope,
};

use crate::config::{DevicePlan, PlannedVm};
use crate::threads;
pub use error::LandlockError;
use granted::Granted;
use rule::Missing;
pub(crate) use rule::Rule;

/// The first version that controls truncation: without it, a file that may only be read could be emptied.
const LEAST: ABI = ABI::V3;

/// The rules that confine this process's threads, once there are any. They cannot be widened.
static DOMAIN: OnceLock<Domain> = OnceLock::new();

thread_local! {
    /// True once this thread has confined itself. Threads that a confined one starts are confined, too.
    static CONFINED: Cell<bool> = const { Cell::new(false) };
}

/// Rules that threads are confined by.
struct Domain {
    ruleset: RulesetCreated,
    granted: Granted,
    /// The files of the rules. A file system such as `proc` has a new file at a path once nobody holds the old one.
    _files: Vec<PathFd>,
}

impl Domain {
    /// Asks the kernel for these rules. Confines nobody yet.
    fn new(rules: &[Rule]) -> Result<Self, LandlockError> {
        let mut ruleset = handled()?.create()?;
        let (mut granted, mut files) = (Granted::default(), Vec::new());
        for rule in rules {
            rule.make()?;
            let file = match rule.missing {
                Missing::Skip if !rule.path.exists() => continue,
                _ => rule.look()?,
            };
            let access = file.legitimate(rule.access);
            if granted.has(&file, access) {
                continue;
            }
            let fd = PathFd::new(&rule.path).map_err(|error| rule.failed(io::Error::other(error)))?;
            granted.add(&file, access);
            ruleset = ruleset.add_rule(PathBeneath::new(&fd, access))?;
            files.push(fd);
        }
        Ok(Self { ruleset, granted, _files: files })
    }

    /// Confines the calling thread.
    fn enter(&self) -> Result<(), LandlockError> {
        enforce(self.ruleset.try_clone()?)?;
        CONFINED.set(true);
        Ok(())
    }
}

/// All that the kernel can refuse, of what this program was tested with.
fn handled() -> Result<Ruleset, LandlockError> {
    let fs = AccessFs::from_all(LEAST);
    let ruleset = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
    let ruleset = ruleset.handle_access(fs).map_err(|_| LandlockError::Unsupported)?;
    let ruleset = ruleset
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(ABI::V5))?
        .handle_access(AccessNet::from_all(ABI::V4))?;
    let mut scopes = BitFlags::<Scope>::EMPTY;
    // Under an abstract name, the service manager could not be told that the VM is ready.
    if !std::env::var_os("NOTIFY_SOCKET").is_some_and(|name| is_abstract(&name)) {
        scopes |= Scope::AbstractUnixSocket;
    }
    // Threads that confined themselves one by one must be able to signal each other, which kernels without this
    // correction forbid: vCPUs could not be stopped.
    if Erratum::current().contains(Erratum::ScopedSignalHandling) {
        scopes |= Scope::Signal;
    }
    if scopes.is_empty() { Ok(ruleset) } else { Ok(ruleset.scope(scopes)?) }
}

/// True if this is the name of an abstract socket, as environment variables have it.
fn is_abstract(name: &OsStr) -> bool {
    name.as_bytes().first() == Some(&b'@')
}

/// Confines the calling thread by `ruleset`. The process gives up new privileges when it starts.
fn enforce(ruleset: RulesetCreated) -> Result<(), LandlockError> {
    match ruleset.no_new_privs(false).restrict_self()? {
        RestrictionStatus { ruleset: RulesetStatus::NotEnforced, .. } => Err(LandlockError::Unsupported),
        _ => Ok(()),
    }
}

/// Confines the calling thread, and those that it starts or that [`follow`], to what `vm` names and to `more`, if the
/// VM asks for it. Once they are confined, they stay as they are, and every VM must be within that.
///
/// # Errors
///
/// The kernel has no Landlock, a file is missing, or something goes beyond the rules of before. Nothing has changed
/// then.
pub(crate) fn enter(vm: &PlannedVm, more: &[Rule]) -> Result<(), LandlockError> {
    if let Some(domain) = DOMAIN.get() {
        domain.granted.check(more)?;
    }
    if DOMAIN.get().is_some() || !vm.config().landlock_enable {
        return check_vm(vm);
    }
    let domain = Domain::new(&[&named::by_vm(vm), more].concat())?;
    domain.enter()?;
    // Without effect until the domain is set, so no thread is missed that is started at this moment.
    threads::confine_by(|| follow().map_err(io::Error::other));
    // Only the control thread does this, or one thread that opens a VM for it, and which the control thread follows.
    let _ = DOMAIN.set(domain);
    Ok(())
}

/// Rules for the files that a VM restored from the snapshot in `folder` reads besides: the snapshot, as long as its
/// memory comes from there.
pub(crate) fn rules_of_snapshot(folder: &Path) -> Vec<Rule> {
    named::by_snapshot(folder)
}

/// Checks that a confined process may write a snapshot into `folder`.
///
/// # Errors
///
/// It may not.
pub(crate) fn check_destination(folder: &Path) -> Result<(), LandlockError> {
    DOMAIN.get().map_or(Ok(()), |domain| domain.granted.check(&[named::by_destination(folder)]))
}

/// Checks that a confined process may read the certificates in `folder`.
///
/// # Errors
///
/// It may not.
pub(crate) fn check_tls(folder: &Path) -> Result<(), LandlockError> {
    DOMAIN.get().map_or(Ok(()), |domain| domain.granted.check(&[named::by_tls(folder)]))
}

/// Checks that a confined process may use what `vm` names.
///
/// # Errors
///
/// The first file that it may not use.
pub(crate) fn check_vm(vm: &PlannedVm) -> Result<(), LandlockError> {
    DOMAIN.get().map_or(Ok(()), |domain| domain.granted.check(&named::by_vm(vm)))
}

/// Checks that a confined process may use what `device` names.
///
/// # Errors
///
/// The first file that it may not use.
pub(crate) fn check_device(device: &DevicePlan) -> Result<(), LandlockError> {
    DOMAIN.get().map_or(Ok(()), |domain| domain.granted.check(&named::by_device(device)))
}

/// Confines the calling thread, and those that it starts from now on, as the control thread is confined. Without effect
/// if that is not, or if it has been called by this thread before.
///
/// # Errors
///
/// The kernel refuses. The thread must start no other then.
pub(crate) fn follow() -> Result<(), LandlockError> {
    match DOMAIN.get() {
        Some(domain) if !CONFINED.get() => domain.enter(),
        _ => Ok(()),
    }
}

/// The beginning of a thread that uses no file but those that it gets open, and `but` if that is given, which it writes
/// to: where the kernel can, it is kept from all others.
pub(crate) fn isolation(but: Option<PathBuf>) -> impl FnOnce() {
    move || {
        // It is no promise to anybody: a VM that asks for it is refused where this is impossible.
        if let Err(error) = isolate(but) {
            log::debug!("this thread is not kept from files: {error}");
        }
    }
}

fn isolate(but: Option<PathBuf>) -> Result<(), LandlockError> {
    let mut ruleset = handled()?.create()?;
    if let Some(path) = but {
        let fd = PathFd::new(&path).map_err(io::Error::other)?;
        ruleset = ruleset.add_rule(PathBeneath::new(fd, AccessFs::WriteFile))?;
    }
    enforce(ruleset)
}
