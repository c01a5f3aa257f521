//! Faults of the payload or of the host. These tests need a usable /dev/kvm.

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command as StdCommand, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::{Pid, Signal};
use tempfile::tempdir;

use crate::files::Files;
use crate::run::{BINARY, Run, WRONG, interfaces};

/// Error for a VM with only its kernel and these options.
fn wrong(arguments: &[&str]) -> String {
    Run::new(arguments).refused(WRONG)
}

fn root() {
    let uid = fs::read_to_string("/proc/self/status").unwrap();
    assert!(
        uid.lines().any(|line| line.starts_with("Uid:\t0\t")),
        "this test takes rights away, and needs root to do it"
    );
}

#[test]
fn a_missing_kernel_is_refused() {
    assert_eq!(
        wrong(&["--kernel", "/nonexistent/vmlinux"]),
        "--kernel /nonexistent/vmlinux: cannot be read: No such file or directory (os error 2)"
    );
}

#[test]
fn a_symlink_as_an_output_file_is_refused_and_its_target_kept() {
    let files = Files::new();
    let (kernel, link) = (files.idle_kernel(), files.path("link").display().to_string());
    std::os::unix::fs::symlink(files.write("precious", b"old"), &link).unwrap();
    let by_key = |key: &str| format!("{key}={link}");
    for (option, value) in [
        ("--log-file", link.clone()),
        ("--event-monitor", by_key("path")),
        ("--serial", by_key("file")),
        ("--console", by_key("file")),
        ("--debug-console", by_key("file")),
    ] {
        let said = wrong(&["--kernel", &kernel, "--memory", "size=64M", option, &value]);
        assert!(said.starts_with(option) && said.contains(&link), "{said}");
        assert!(said.contains("it is a symbolic link, and links are not followed"), "{said}");
    }
    assert_eq!(fs::read(files.path("precious")).unwrap(), b"old");
}

#[test]
fn an_unreadable_kernel_is_refused() {
    let files = Files::new();
    let directory = files.path("").into_os_string().into_string().unwrap();
    assert_eq!(wrong(&["--kernel", &directory]), format!("--kernel {directory}: not a regular file"));
}

#[test]
fn a_kernel_that_is_neither_elf_nor_bzimage_is_refused() {
    let files = Files::new();
    let kernel = files.write("text", &[b'x'; 8192]);
    assert_eq!(
        wrong(&["--kernel", &kernel]),
        format!("--kernel {kernel}: neither a bzImage nor an ELF file; give an x86_64 vmlinuz or vmlinux")
    );
    let empty = files.write("empty", b"");
    assert_eq!(
        wrong(&["--kernel", &empty]),
        format!("--kernel {empty}: neither a bzImage nor an ELF file; give an x86_64 vmlinuz or vmlinux")
    );
}

#[test]
fn a_backend_that_is_missing_is_refused() {
    let files = Files::new();
    let kernel = files.idle_kernel();
    let refused = |options: &[&str]| {
        Run::new(&[&["--kernel", kernel.as_str()], options].concat()).with_taps("climiss").refused(WRONG)
    };
    let no_device = "no such device; create one (vdpa dev add name NAME mgmtdev DEVICE) and load the module vhost_vdpa \
                     (modprobe vhost_vdpa)";
    assert_eq!(
        refused(&["--vdpa", "id=v,path=/dev/vhost-vdpa-none"]),
        format!("--vdpa id=v,path=/dev/vhost-vdpa-none: {no_device}")
    );
    // The PF's tap and that of VF 0 were created before, and are removed again.
    let pf = ["--net", "id=pf0,tap=climiss,sriov_vfs=2", "--net-vf"];
    assert_eq!(
        refused(&[&pf[..], &["pf=pf0,index=1,vdpa=/dev/vhost-vdpa-none"]].concat()),
        format!("--net-vf pf=pf0,index=1,vdpa=/dev/vhost-vdpa-none: {no_device}")
    );
    assert_eq!(
        refused(&[&pf[..], &["pf=pf0,index=1,vhost_user=on,socket=/nonexistent/s"]].concat()),
        "--net-vf pf=pf0,index=1,socket=/nonexistent/s: no such file; start the backend first, or give the path of \
         its socket"
    );
    assert_eq!(
        refused(&["--net", "vhost_user=on,socket=/nonexistent/s,vhost_mode=server"]),
        "--net id=_net0,socket=/nonexistent/s: the folder /nonexistent does not exist; make it (mkdir -p), or give \
         another path"
    );
    for (option, value, id) in [
        ("--fs", "tag=t", "_fs0"),
        ("--disk", "vhost_user=on", "_disk0"),
        ("--generic-vhost-user", "device_type=sound,queue_sizes=[64,64]", "_generic_vhost_user0"),
    ] {
        let missing = "no such file; start the backend first, or give the path of its socket";
        assert_eq!(
            refused(&[option, &format!("{value},socket=/nonexistent/s")]),
            format!("{option} id={id},socket=/nonexistent/s: {missing}")
        );
    }
}

#[test]
fn a_policy_that_cannot_be_enforced_ends_the_program() {
    for (backend, key, carrier) in [
        ("vhost=on", "vhost", "vhost-net carries"),
        ("vhost_user=on,socket=/s", "vhost_user", "another process (vhost_user=on) carries"),
        ("vdpa=/d", "vdpa", "a vDPA device carries"),
    ] {
        for policy in ["vlan=5", "trunk=[5]", "spoofchk=on", "trust=off", "max_tx_rate=5", "storm=5"] {
            let vf = format!("pf=a,index=0,{backend},{policy}");
            let what = format!(
                "--net-vf pf=a,index=0,{policy}: {carrier} this function's packets past this program; leave {key} out, \
                 or set it on the host (docs/policy.md)"
            );
            assert_eq!(wrong(&["--kernel", "k", "--net", "id=a,sriov_vfs=1", "--net-vf", &vf]), what);
        }
    }
}

#[test]
fn an_initramfs_larger_than_memory_is_refused() {
    let files = Files::new();
    let (kernel, initramfs) = (files.idle_kernel(), files.sparse("initramfs", 128 << 20));
    let arguments = ["--kernel", &kernel, "--initramfs", &initramfs, "--memory", "size=64M"];
    let said = wrong(&arguments);
    assert!(said.starts_with(&format!("--initramfs {initramfs}: does not fit into the guest's memory; ")), "{said}");
    assert!(said.ends_with(" MiB are needed, give more with --memory size="), "{said}");
    let missing = ["--kernel", &kernel, "--initramfs", "/nonexistent/initrd"];
    assert_eq!(
        wrong(&missing),
        "--initramfs /nonexistent/initrd: cannot be read: No such file or directory (os error 2)"
    );
}

#[test]
fn a_command_line_longer_than_the_kernel_takes_is_refused() {
    let files = Files::new();
    let said = wrong(&["--kernel", &files.idle_kernel(), "--cmdline", &"x".repeat(70_000)]);
    assert!(said.starts_with("--cmdline: 70000 bytes long; this kernel takes at most "), "{said}");
}

// Rights.

/// The command as a user who may read only `files`, and nothing else of importance.
fn as_nobody(files: &Files, arguments: &[&str]) -> Run {
    root();
    // The binary may lie where only root can reach it.
    let binary = files.path("cloud-hypervisor");
    // Copied by another program: a child that another test has just forked would inherit the file opened for writing
    // here, and such a file cannot be executed.
    assert!(StdCommand::new("cp").arg(BINARY).arg(&binary).status().unwrap().success());
    let mut command = StdCommand::new(binary);
    command.args(arguments).uid(65534).gid(65534);
    // Its working directory must be accessible, too.
    let home = tempdir().unwrap();
    fs::set_permissions(home.path(), Permissions::from_mode(0o755)).unwrap();
    Run::of(command, home)
}

#[test]
fn no_right_to_kvm_is_reported() {
    let files = Files::new();
    let kernel = files.idle_kernel();
    assert_eq!(
        as_nobody(&files, &["--kernel", &kernel]).refused(WRONG),
        "/dev/kvm: no permission to open it; join the group that owns it (usually kvm) or run as root"
    );
}

#[test]
fn no_kvm_is_reported() {
    root();
    let files = Files::new();
    let mut command = StdCommand::new("unshare");
    // An empty /dev of its own.
    command.args(["--mount", "sh", "-c", "mount -t tmpfs none /dev && exec \"$@\"", "sh", BINARY]);
    command.args(["--kernel", &files.idle_kernel()]);
    assert_eq!(
        Run::of(command, tempdir().unwrap()).refused(WRONG),
        "/dev/kvm: there is no such device; load the module kvm_amd or kvm_intel, and check that virtualisation is \
         enabled in the firmware"
    );
}

#[test]
fn no_right_to_the_tun_driver_names_what_needs_none() {
    root();
    let files = Files::new();
    let binary = files.path("cloud-hypervisor");
    assert!(StdCommand::new("cp").arg(BINARY).arg(&binary).status().unwrap().success());
    // Nodes of its own, of which the user may open only that of KVM.
    let script = "cd \"$1\" && shift && mknod kvm c 10 232 && chmod 666 kvm && mknod tun c 10 200 && chmod 600 tun \
                  && mount --bind kvm /dev/kvm && mount --bind tun /dev/net/tun \
                  && exec setpriv --reuid=65534 --regid=65534 --clear-groups \"$@\"";
    let mut command = StdCommand::new("unshare");
    command.args(["--mount", "sh", "-c", script, "sh"]).arg(files.path("")).arg(binary);
    command.args(["--kernel", &files.idle_kernel(), "--net", "id=a,tap=clitun,sriov_vfs=2"]);
    assert_eq!(
        Run::of(command, tempdir().unwrap()).refused(WRONG),
        "--net id=a: no permission to open /dev/net/tun; pass an open tap (fd=), give a PF a switch (switch=veb), or \
         give this user read and write access to it"
    );
}

#[test]
fn no_right_to_create_a_tap_is_reported() {
    root();
    let files = Files::new();
    let mut command = StdCommand::new("setpriv");
    command.args(["--bounding-set=-net_admin", "--inh-caps=-net_admin", BINARY]);
    command.args(["--kernel", &files.idle_kernel(), "--net", "id=a,tap=cliright"]);
    assert_eq!(
        Run::of(command, tempdir().unwrap()).with_taps("cliright").refused(WRONG),
        "--net id=a: no permission to create the tap cliright; create it for this user \
         (ip tuntap add cliright mode tap user USER), or run with CAP_NET_ADMIN"
    );
}

/// A VM that idles, until this is dropped.
struct Idle(Child);

impl Idle {
    /// Starts a VM with this tap, and waits until it runs.
    fn start(files: &Files, tap: &str, arguments: &[&str]) -> Self {
        let mut command = StdCommand::new(BINARY);
        command.args(["--kernel", &files.idle_kernel(), "--memory", "size=16M", "--net", &format!("id=a,tap={tap}")]);
        command.args(arguments);
        Self::of(command)
    }

    /// Starts a VM with this command, and waits until it runs.
    fn of(mut command: StdCommand) -> Self {
        let mut vm = Self(command.stdin(Stdio::null()).spawn().unwrap());
        vm.wait_until(|vm| vm.threads().contains(&"vcpu0\n".to_string()));
        vm
    }

    fn wait_until(&mut self, done: impl Fn(&Self) -> bool) {
        let patience = Instant::now() + Duration::from_secs(60);
        while !done(self) {
            assert!(self.0.try_wait().unwrap().is_none(), "the VM ended too early");
            assert!(Instant::now() < patience, "the VM does not get so far");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Names of its threads.
    fn threads(&self) -> Vec<String> {
        let threads = fs::read_dir(format!("/proc/{}/task", self.0.id())).unwrap();
        threads.filter_map(|thread| fs::read_to_string(thread.unwrap().path().join("comm")).ok()).collect()
    }

    /// Sends SIGTERM, and waits until it has ended.
    fn terminate(mut self) -> ExitStatus {
        let pid = Pid::from_child(&self.0);
        rustix::process::kill_process(pid, Signal::TERM).unwrap();
        let patience = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < patience, "the VM still runs after SIGTERM");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Idle {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_tap_that_another_vm_has_is_refused() {
    root();
    let files = Files::new();
    let _vm = Idle::start(&files, "clibusy", &[]);
    assert_eq!(
        Run::new(&["--kernel", &files.idle_kernel(), "--net", "id=b,tap=clibusy"]).refused(WRONG),
        "--net id=b: clibusy is in use by another process; stop that one, or name another tap"
    );
}

#[test]
fn files_created_before_a_failure_are_removed() {
    root();
    let files = Files::new();
    // VF 0's tap is created; that of VF 1 is not usable.
    let arguments = ["--net", "id=a,tap=clileft,sriov_vfs=2", "--net-vf", "pf=a,index=1,tap=lo"];
    let said =
        Run::new(&[&["--kernel", &files.idle_kernel()], &arguments[..]].concat()).with_taps("clileft").refused(WRONG);
    assert!(said.contains("lo exists and is not a tap with a virtio header"), "{said}");
}

/// The command under a limit of open files, soft and hard, with a PF whose taps have the prefix `tap`.
fn limited(files: &Files, (soft, hard): (u64, u64), tap: &str, vfs: u16) -> StdCommand {
    let mut command = StdCommand::new("sh");
    let limit = format!("ulimit -Sn {soft} && ulimit -Hn {hard} && exec \"$@\"");
    command.args(["-c", &limit, "sh", BINARY, "--kernel", &files.idle_kernel(), "--memory", "size=16M"]);
    command.args(["--net", &format!("id=a,tap={tap},sriov_vfs={vfs}")]);
    command
}

#[test]
fn too_few_open_files_are_refused_with_what_would_be_enough() {
    root();
    let files = Files::new();
    let command = limited(&files, (128, 256), "clifew", 300);
    let said = Run::of(command, tempdir().unwrap()).with_taps("clifew").refused(WRONG);
    let needed = said.strip_prefix("this VM needs up to ").unwrap().split(' ').next().unwrap().parse::<u64>().unwrap();
    // 301 functions of a tap, a doorbell and 4 interrupts each.
    assert!((1806..2500).contains(&needed), "{said}");
    let rest = format!(
        " open files, and the limit is 256; raise it (ulimit -n {needed}, or LimitNOFILE={needed} in a systemd unit), \
         or reserve fewer VFs"
    );
    assert!(said.ends_with(&rest), "{said}");
    let vm = Idle::of(limited(&files, (needed, needed), "clienough", 300));
    assert_eq!(vm.terminate().code(), Some(0));
}

#[test]
fn a_soft_limit_of_open_files_is_raised() {
    root();
    let files = Files::new();
    let vm = Idle::of(limited(&files, (16, 1024), "clisoft", 16));
    assert_eq!(vm.terminate().code(), Some(0));
}

#[test]
fn triple_faults_are_reported_less_and_less_often() {
    let files = Files::new();
    let mut command = StdCommand::new(BINARY);
    command.args(["--kernel", &files.faulting_kernel(), "--memory", "size=16M"]);
    let mut vm = Idle(command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap());
    let said = BufReader::new(vm.0.stderr.take().unwrap()).lines();
    let told: Vec<_> = said.map(Result::unwrap).take(4).collect();
    for (line, number) in told.iter().zip([1, 2, 4, 8]) {
        assert!(line.contains(" WARN ") && line.contains("--cmdline \"console=ttyS0"), "{line}");
        assert!(line.contains(&format!("after a triple fault (number {number});")), "{line}");
    }
    assert_eq!((told.len(), vm.terminate().code()), (4, Some(0)));
}

#[test]
fn a_signal_ends_a_vm_that_is_still_being_made() {
    root();
    let files = Files::new();
    let mut command = StdCommand::new(BINARY);
    command.args(["--kernel", &files.idle_kernel(), "--net", "tap=climaking"]);
    // No backend connects: the command waits for one for 10 s before it opens anything else.
    let socket = files.path("backend");
    command.arg(format!("vhost_user=on,vhost_mode=server,socket={}", socket.display()));
    let mut vm = Idle(command.spawn().unwrap());
    vm.wait_until(|_| socket.exists());
    let ended = vm.terminate();
    assert_eq!(ended.signal(), Some(Signal::TERM.as_raw()));
    // The kernel needs time to clean up a killed process.
    let patience = Instant::now() + Duration::from_secs(60);
    while interfaces().contains(&"climaking".to_string()) {
        assert!(Instant::now() < patience, "the tap is left behind");
        std::thread::sleep(Duration::from_millis(20));
    }
}

// The log.

#[test]
fn only_the_user_may_read_the_log_file() {
    root();
    let files = Files::new();
    for verbose in [&[][..], &["-v"], &["-vv"]] {
        let log = files.path("log");
        let _ = fs::remove_file(&log);
        let vm = Idle::start(&files, "clilog", &[&["--log-file", log.to_str().unwrap()], verbose].concat());
        assert_eq!(vm.terminate().code(), Some(0));
        assert_eq!(fs::metadata(&log).unwrap().permissions().mode() & 0o777, 0o600);
        let text = fs::read_to_string(&log).unwrap();
        let told = text.contains("INFO vmm::control: vmm: stopped by a signal");
        assert_eq!(told, !verbose.is_empty(), "{verbose:?}: {text}");
        assert!(!interfaces().contains(&"clilog".to_string()));
    }
}

#[test]
fn a_start_that_fails_is_in_the_log_file_as_well() {
    let files = Files::new();
    let (log, kernel) = (files.path("log"), files.path("nosuch"));
    let said = wrong(&["--kernel", kernel.to_str().unwrap(), "--log-file", log.to_str().unwrap()]);
    let text = fs::read_to_string(&log).unwrap();
    assert!(text.lines().any(|line| line.contains("ERROR") && line.ends_with(&said)), "{said}: {text}");
}

/// Lines that do not fit into the pipe are dropped, and nothing waits for a reader.
#[test]
fn a_log_is_written_to_a_pipe_whose_reader_comes_later_or_never() {
    root();
    let files = Files::new();
    for format in [&[][..], &["--log-format", "{level} {msg}"]] {
        let log = files.path("pipe");
        let _ = fs::remove_file(&log);
        mknodat(CWD, &log, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let arguments = |verbose| [&[verbose, "--log-file", log.to_str().unwrap()], format].concat();
        assert_eq!(Idle::start(&files, "clipipe", &arguments("-vvv")).terminate().code(), Some(0));
        let vm = Idle::start(&files, "clipipe", &arguments("-v"));
        let mut reader = fs::File::open(&log).unwrap();
        assert_eq!(vm.terminate().code(), Some(0));
        let mut text = String::new();
        std::io::Read::read_to_string(&mut reader, &mut text).unwrap();
        assert!(text.contains("stopped by a signal"), "{text}");
    }
}

#[test]
fn a_process_that_may_have_no_thread_is_refused_with_the_cause() {
    root();
    let files = Files::new();
    let mut command = StdCommand::new("setpriv");
    command.args(["--reuid=65533", "--clear-groups", "prlimit", "--nproc=0", BINARY, "--kernel", &files.idle_kernel()]);
    for more in [&[][..], &["--seccomp", "false"]] {
        let output = command.args(more).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(
            said.starts_with("cloud-hypervisor: cannot start a thread (raise the limit: prlimit --nproc"),
            "{said}"
        );
        assert_eq!((output.status.code(), said.lines().count()), (Some(1), 1), "{said}");
    }
}

#[test]
fn a_source_without_random_bytes_is_refused() {
    let files = Files::new();
    assert_eq!(
        wrong(&["--kernel", &files.idle_kernel(), "--memory", "size=64M", "--rng", "src=/dev/null"]),
        "--rng id=__rng: src=/dev/null: has no bytes; give a source that never ends, such as /dev/urandom"
    );
}

#[test]
fn a_log_has_the_format_that_was_asked_for() {
    let files = Files::new();
    let (kernel, log) = (files.off_kernel(), files.path("log"));
    let common = ["--firmware", &kernel, "--cmdline", "x", "--memory", "size=64M", "--console", "off", "--log-format"];
    let run = |more: &[&str]| {
        let output = Run::new(&[&common[..], more].concat()).command.output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let said = run(&["{{{level}}} {levelchar} <{thread}> {msg}"]);
    let expected = "{WARN} W <main> --cmdline has no effect with --firmware, which boots what it finds on a disk\n";
    assert!(said.contains(expected), "{said}");
    assert_eq!(run(&["{boottime} {wallclock} {location} {msg}", "--log-file", log.to_str().unwrap()]), "");
    let text = fs::read_to_string(log).unwrap();
    let words: Vec<_> = text.lines().next().unwrap().split_whitespace().collect();
    assert!(words[0].parse::<f64>().unwrap() < 60.0, "{text}");
    assert!(words[1].starts_with("20") && words[1].ends_with('Z') && words[1].len() == 27, "{text}");
    assert!(words[2].starts_with("vmm/src/vm/boot.rs:"), "{text}");
}

// The guest's end.

#[test]
fn a_guest_that_switches_itself_off_ends_the_program() {
    let files = Files::new();
    let kernel = files.off_kernel();
    let mut run = Run::new(&["--kernel", &kernel, "--memory", "size=64M"]);
    assert!(run.command.output().unwrap().status.success());
}
