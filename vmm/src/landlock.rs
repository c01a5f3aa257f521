//! Landlock: the files that this process may use, and no others (Linux, `Documentation/userspace-api/landlock.rst`).
//!
//! A thread confines itself and the threads that it starts from then on, permanently. The control thread does so if a
//! VM requires it, before it opens anything of that VM. Threads that exist already when a VM is created either open
//! nothing and start with [`isolation`], or call [`follow`] before they start a thread of the VM.
//!
//! Besides files, the kernel restricts TCP (from Linux 6.7 on), and abstract sockets and signals of other processes
//! (from 6.12 on). It does not restrict connections to sockets with a path.

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

use crate::config::VmConfig;
use crate::threads;
pub use error::LandlockError;
use granted::Granted;
pub(crate) use named::sysfs;
pub(crate) use rule::{Missing, READ, Rule, WRITE};

/// The first version that controls truncation: without that, a read-only file could be emptied.
const LEAST: ABI = ABI::V3;

/// The rules that confine this process's threads, once they are set. They cannot be widened.
static DOMAIN: OnceLock<Domain> = OnceLock::new();

thread_local! {
    /// True once this thread has confined itself. Threads that a confined thread starts are confined as well.
    static CONFINED: Cell<bool> = const { Cell::new(false) };
}

/// Rules that confine threads.
struct Domain {
    ruleset: RulesetCreated,
    granted: Granted,
    /// The files of the rules, kept open. A file system such as `proc` makes a new inode for a path once the old one is
    /// unused.
    _files: Vec<PathFd>,
}

impl Domain {
    /// Creates the rules in the kernel, without confining a thread.
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

/// The accesses that the kernel can refuse, among those that this program was tested with.
fn handled() -> Result<Ruleset, LandlockError> {
    let fs = AccessFs::from_all(LEAST);
    let ruleset = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
    let ruleset = ruleset.handle_access(fs).map_err(|_| LandlockError::Unsupported)?;
    let ruleset = ruleset
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(ABI::V5))?
        .handle_access(AccessNet::from_all(ABI::V4))?;
    let mut scopes = BitFlags::<Scope>::EMPTY;
    // With an abstract name, the service manager could not be notified that the VM is ready.
    if !std::env::var_os("NOTIFY_SOCKET").is_some_and(|name| is_abstract(&name)) {
        scopes |= Scope::AbstractUnixSocket;
    }
    // Threads that confined themselves one by one must be able to signal each other, which kernels without this fix
    // forbid: vCPUs could not be stopped.
    if Erratum::current().contains(Erratum::ScopedSignalHandling) {
        scopes |= Scope::Signal;
    }
    if scopes.is_empty() { Ok(ruleset) } else { Ok(ruleset.scope(scopes)?) }
}

/// True if this is the name of an abstract socket, as in environment variables.
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

/// If the VM requires it, confines the calling thread, and those that it starts or that [`follow`], to the files that
/// `vm` names, to those of its `devices`, and to `more`. The confinement is permanent, and every later VM must be
/// within it.
///
/// # Errors
///
/// Fails if the kernel has no Landlock, a file is missing, or an access exceeds the present rules. Nothing has changed
/// then.
pub(crate) fn enter(vm: &VmConfig, devices: impl FnOnce() -> Vec<Rule>, more: &[Rule]) -> Result<(), LandlockError> {
    if let Some(domain) = DOMAIN.get() {
        domain.granted.check(more)?;
    }
    if DOMAIN.get().is_some() || !vm.landlock_enable {
        return check_vm(vm, devices);
    }
    let domain = Domain::new(&[&named::by_vm(vm), &devices()[..], more].concat())?;
    domain.enter()?;
    // Without effect until the domain is set, so no thread started at this moment is missed.
    threads::confine_by(|| follow().map_err(io::Error::other));
    // Only one thread does this: the control thread, or a thread that opens a VM for it and that it then follows.
    let _ = DOMAIN.set(domain);
    Ok(())
}

/// Rules for the additional files that a VM restored from the snapshot in `folder` reads: the snapshot, while its
/// memory comes from there.
pub(crate) fn rules_of_snapshot(folder: &Path) -> Vec<Rule> {
    named::by_snapshot(folder)
}

/// Checks that a confined process may write a snapshot into `folder`.
///
/// # Errors
///
/// Fails if it may not.
pub(crate) fn check_destination(folder: &Path) -> Result<(), LandlockError> {
    DOMAIN.get().map_or(Ok(()), |domain| domain.granted.check(&[named::by_destination(folder)]))
}

/// Checks that a confined process may read the certificates in `folder`.
///
/// # Errors
///
/// Fails if it may not.
pub(crate) fn check_tls(folder: &Path) -> Result<(), LandlockError> {
    DOMAIN.get().map_or(Ok(()), |domain| domain.granted.check(&[named::by_tls(folder)]))
}

/// Checks that a confined process may use the files that `vm` names, and those of its `devices`. Finding these may open
/// some, so that is left out without confinement.
///
/// # Errors
///
/// Fails with the first file that it may not use.
pub(crate) fn check_vm(vm: &VmConfig, devices: impl FnOnce() -> Vec<Rule>) -> Result<(), LandlockError> {
    DOMAIN.get().map_or(Ok(()), |domain| domain.granted.check(&[named::by_vm(vm), devices()].concat()))
}

/// Checks that a confined process may use the files of a device.
///
/// # Errors
///
/// Fails with the first file that it may not use.
pub(crate) fn check_device(device: impl FnOnce() -> Vec<Rule>) -> Result<(), LandlockError> {
    DOMAIN.get().map_or(Ok(()), |domain| domain.granted.check(&device()))
}

/// Confines the calling thread, and those that it starts from now on, like the control thread. Without effect if the
/// control thread is not confined, or the calling thread has called it before.
///
/// # Errors
///
/// Fails if the kernel refuses. The thread must then start no other.
pub(crate) fn follow() -> Result<(), LandlockError> {
    match DOMAIN.get() {
        Some(domain) if !CONFINED.get() => domain.enter(),
        _ => Ok(()),
    }
}

/// True if the process may use only the files of its rules.
pub(crate) fn is_entered() -> bool {
    DOMAIN.get().is_some()
}

/// Start function of a thread that uses only files passed to it open, and writes to the file `but`, if given: if the
/// kernel can, it denies the thread all others.
pub(crate) fn isolation(but: Option<PathBuf>) -> impl FnOnce() {
    move || {
        // Best effort: a VM that requires confinement is refused if the kernel cannot do this.
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
