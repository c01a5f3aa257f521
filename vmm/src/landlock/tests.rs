//! Confined threads of this process. They need a kernel with Landlock.

use std::fs::{self, File};
use std::net::{TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;
use std::thread;

use rustix::process::{Pid, Signal, getpid, kill_process};
use tempfile::TempDir;

use super::rule::{READ, SOCKETS, WRITE};
use super::*;
use crate::config::VmConfig;
use crate::error_kind::ErrorKind;

fn rule(path: &Path, access: BitFlags<AccessFs>) -> Rule {
    Rule::new("--test", path, access)
}

/// Runs `run` in a thread that these rules confine.
fn in_domain<T: Send>(rules: &[Rule], run: impl FnOnce() -> T + Send) -> T {
    let domain = Domain::new(rules).unwrap();
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            rustix::thread::set_no_new_privs(true).unwrap();
            domain.enter().unwrap();
            // A thread that the confined thread starts is confined as well.
            thread::scope(|scope| scope.spawn(run).join().unwrap())
        });
        thread.join().unwrap()
    })
}

fn folder_with(names: &[&str]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    names.iter().for_each(|name| fs::write(folder.path().join(name), "x").unwrap());
    folder
}

fn writes(path: &Path) -> io::Result<File> {
    File::options().write(true).open(path)
}

#[test]
fn a_file_is_used_as_its_rule_allows_and_no_other_is() {
    let folder = folder_with(&["read", "write", "both", "other"]);
    let at = |name: &str| folder.path().join(name);
    let rules = [rule(&at("read"), READ), rule(&at("write"), WRITE), rule(&at("both"), READ | WRITE)];
    in_domain(&rules, || {
        let found =
            ["read", "write", "both", "other"].map(|name| (File::open(at(name)).is_ok(), writes(&at(name)).is_ok()));
        assert_eq!(found, [(true, false), (false, true), (true, true), (false, false)]);
        // Truncating is writing.
        assert!(
            rustix::fs::open(at("read"), rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::TRUNC, 0.into()).is_err()
        );
        assert!(fs::read_dir(folder.path()).is_err() && fs::write(at("new"), "").is_err());
        assert!(fs::remove_file(at("both")).is_err() && fs::rename(at("both"), at("else")).is_err());
        assert!(fs::hard_link(at("both"), at("else")).is_err() && fs::create_dir(at("folder")).is_err());
        assert_eq!(File::open("/etc/passwd").unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    });
    assert_eq!(fs::read(at("read")).unwrap(), b"x");
}

#[test]
fn landlock_allows_only_sockets_in_their_folder() {
    let folder = folder_with(&["file"]);
    let at = |name: &str| folder.path().join(name);
    in_domain(&[Rule::of_socket("--test", &at("socket"))], || {
        for _ in 0..2 {
            let listener = UnixListener::bind(at("socket")).unwrap();
            UnixStream::connect(at("socket")).unwrap();
            drop(listener);
            fs::remove_file(at("socket")).unwrap();
        }
        assert!(File::open(at("file")).is_err() && File::create(at("new")).is_err());
        assert!(UnixListener::bind("/tmp/landlock-test-elsewhere").is_err());
    });
    assert_eq!(Rule::of_socket("--test", Path::new("socket")).path, Path::new("."));
}

#[test]
fn landlock_denies_exec_tcp_abstract_sockets_and_signals() {
    let folder = folder_with(&["file"]);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let name = format!("landlock-test-{}", std::process::id());
    let name = SocketAddr::from_abstract_name(name).unwrap();
    let _abstract = UnixListener::bind_addr(&name).unwrap();
    let mut other = Command::new("sleep").arg("600").spawn().unwrap();
    let pid = Pid::from_child(&other);
    let address = listener.local_addr().unwrap();
    let fixed = Erratum::current().contains(Erratum::ScopedSignalHandling);
    in_domain(&[rule(folder.path(), READ)], || {
        let denied = |result: io::Result<()>| result.unwrap_err().kind() == io::ErrorKind::PermissionDenied;
        assert!(denied(Command::new("/bin/true").status().map(drop)));
        assert!(denied(TcpStream::connect(address).map(drop)));
        assert!(denied(TcpListener::bind("127.0.0.1:0").map(drop)));
        assert!(denied(UnixStream::connect_addr(&name).map(drop)));
        assert_eq!(kill_process(pid, Signal::CONT).is_err(), fixed);
        // Threads of the process can signal each other.
        kill_process(getpid(), Signal::CONT).unwrap();
    });
    assert!(TcpStream::connect(address).is_ok() && UnixStream::connect_addr(&name).is_ok());
    other.kill().unwrap();
    other.wait().unwrap();
}

#[test]
fn an_isolated_thread_opens_nothing_but_its_pipe() {
    let folder = folder_with(&["pipe", "file"]);
    let at = |name: &str| folder.path().join(name);
    let run = || {
        let opened = ["pipe", "file"].map(|name| writes(&at(name)).is_ok());
        (opened, File::open("/etc/passwd").is_ok(), UnixStream::pair().is_ok())
    };
    let of_thread = |but: Option<PathBuf>| {
        thread::scope(|scope| {
            let isolate = isolation(but);
            let run = || {
                rustix::thread::set_no_new_privs(true).unwrap();
                isolate();
                run()
            };
            scope.spawn(run).join().unwrap()
        })
    };
    assert_eq!(of_thread(None), ([false, false], false, true));
    assert_eq!(of_thread(Some(at("pipe"))), ([true, false], false, true));
}

#[test]
fn a_missing_path_is_refused_left_out_or_made() {
    let folder = folder_with(&[]);
    let path = folder.path().join("new");
    let refused = Domain::new(&[rule(&path, READ)]).err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::Invalid);
    assert!(Domain::new(&[Rule { missing: Missing::Skip, ..rule(&path, READ) }]).is_ok());
    assert!(!path.exists());
    assert!(Domain::new(&[Rule { missing: Missing::Make, ..rule(&path, WRITE) }]).is_ok());
    assert!(path.exists());
}

#[test]
fn the_check_agrees_with_the_kernel() {
    let folder = folder_with(&["a", "b", "link-target"]);
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("in")).unwrap();
    fs::write(at("in/c"), "").unwrap();
    std::os::unix::fs::symlink(at("link-target"), at("in/link")).unwrap();
    let rules = [rule(&at("a"), READ), rule(&at("in"), READ | SOCKETS), rule(&at("in/c"), WRITE)];
    let granted = Domain::new(&rules).unwrap().granted;
    let asked = [
        (rule(&at("a"), READ), true),
        (rule(&at("a"), READ | WRITE), false),
        (rule(&at("b"), READ), false),
        (rule(&at("in/c"), READ | WRITE), true),
        (rule(&at("in"), SOCKETS), true),
        (rule(folder.path(), SOCKETS), false),
        // A rule belongs to the file, not to the name that leads to it.
        (rule(&at("in/link"), READ), false),
        (rule(&at("in/../a"), READ), true),
        // Opening reports that it is missing.
        (rule(&at("missing"), READ), true),
        (Rule { missing: Missing::Skip, ..rule(&at("b"), READ) }, true),
    ];
    for (rule, allowed) in &asked {
        assert_eq!(granted.check(std::slice::from_ref(rule)).is_ok(), *allowed, "{rule:?}");
    }
    in_domain(&rules, || {
        for (Rule { path, access, missing, .. }, allowed) in &asked {
            if *missing == Missing::Refuse && path.is_file() {
                let file = File::options().read(true).write(access.contains(AccessFs::WriteFile)).open(path);
                assert_eq!(file.is_ok(), *allowed, "{path:?}");
            }
        }
    });
    // Another file of the same name.
    fs::remove_file(at("a")).unwrap();
    fs::write(at("new"), "").unwrap();
    fs::rename(at("new"), at("a")).unwrap();
    assert!(granted.check(&[rule(&at("a"), READ)]).is_err());
}

#[test]
fn temporary_files_without_a_name_are_made_in_folders() {
    use rustix::fs::{Mode, OFlags};
    let folder = folder_with(&[]);
    in_domain(&[rule(folder.path(), READ | WRITE)], || {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let file = rustix::fs::open(folder.path(), flags, Mode::RUSR | Mode::WUSR).unwrap();
        rustix::fs::ftruncate(&file, 4096).unwrap();
    });
}

#[test]
fn a_configuration_names_its_files_and_what_they_are_needed_for() {
    let folder = folder_with(&[]);
    let at = |name: &str| folder.path().join(name);
    let text = |name: &str| at(name).display().to_string();
    let config = serde_json::json!({
        "payload": {"kernel": text("kernel"), "initramfs": text("initramfs")},
        "memory": {"size": 0, "zones": [{"id": "z", "size": 4096, "file": text("zone")}]},
        "tpm": {"socket": text("tpm")},
        "serial": {"mode": "File", "file": text("serial")},
        "console": {"mode": "Socket", "socket": text("console/s")},
        "debug_console": {"mode": "Pty"},
        "landlock_enable": true,
        "landlock_rules": [{"path": text("mine"), "access": "rw"}],
    });
    let config: VmConfig = serde_json::from_value(config).unwrap();
    let rules = named::by_vm(&config);
    let name = |path: &Path| match path.strip_prefix(folder.path()) {
        Ok(name) => name.display().to_string(),
        Err(_) => path.display().to_string(),
    };
    let all = |access: BitFlags<AccessFs>, option: &str| {
        let rules = rules.iter().filter(|rule| rule.access == access && rule.option.starts_with(option));
        rules.map(|rule| name(&rule.path)).collect::<Vec<_>>()
    };
    assert_eq!(all(READ, "--"), ["kernel", "initramfs"]);
    assert_eq!(all(READ | WRITE, "--"), ["zone"]);
    assert_eq!(all(WRITE, "--"), ["serial"]);
    assert_eq!(all(SOCKETS, "--"), ["console"]);
    assert_eq!(all(READ | WRITE | SOCKETS | AccessFs::MakeReg, "--landlock-rules"), ["mine"]);
    assert!(rules.iter().any(|rule| rule.path == Path::new("/dev/ptmx")));
    assert!(rules.iter().filter(|rule| rule.option.is_empty()).all(|rule| rule.missing == Missing::Skip));
    // Files that every user can write would not be a confinement.
    let nothing = named::by_vm(&VmConfig::default());
    let writable: Vec<_> = nothing.iter().filter(|rule| rule.access.contains(AccessFs::WriteFile)).collect();
    assert_eq!(writable.iter().map(|rule| rule.path.as_path()).collect::<Vec<_>>(), [Path::new("/dev/kvm")]);
}
