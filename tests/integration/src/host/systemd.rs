//! A systemd of its own in the first-level machine, with the units of `contrib/systemd` and the programs that they run.
//!
//! It has namespaces of its own for processes and mounts, and a root in memory. Nothing of it remains.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::thread;
use std::time::{Duration, Instant};

use crate::lab;
use crate::peers::Peer;

/// The checkout's folder with the units.
const UNITS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../contrib/systemd");
/// Time that systemd may take for its start, and a unit for a change, in the nested lab.
const LIMIT: Duration = Duration::from_secs(100);

/// Makes the root, and gives way to systemd. Its arguments: folders of systemd, of the lab's programs and of the units.
///
/// Units of Debian are left out: those of this project need nothing but the targets that each service is ordered after.
const SETUP: &str = r#"
systemd=$1 programs=$2 units=$3 root=/tmp/systemd-root
mkdir -p $root
mount -t tmpfs -o mode=755 root $root
cd $root
mkdir -p dev proc run sys tmp root etc/systemd/system etc/cloud-hypervisor var/lib var/log
mkdir -p usr/bin usr/sbin usr/lib/systemd usr/lib/x86_64-linux-gnu usr/lib64
ln -s usr/bin bin; ln -s usr/sbin sbin; ln -s usr/lib lib; ln -s usr/lib64 lib64
cp -a /bin/. usr/bin/
cp "$systemd/systemctl" "$programs/cloud-hypervisor" "$programs/ch-remote" usr/bin/
cp "$systemd/systemd" "$systemd/systemd-executor" usr/lib/systemd/
cp "$systemd"/lib/* usr/lib/x86_64-linux-gnu/
cp usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2 usr/lib64/
cp "$units"/*.service etc/systemd/system/
cp "$units/upgrade-vm" usr/bin/
printf '%s\n' root:x:0:0::/root:/bin/sh > etc/passwd
printf '%s\n' root:x:0: kvm:x:78: > etc/group
printf '%032d\n' 1 > etc/machine-id
touch etc/os-release
for target in sysinit basic shutdown multi-user network; do
    printf '[Unit]\nDefaultDependencies=no\n' > etc/systemd/system/$target.target
done
for unit in cloud-hypervisor cloud-hypervisor-receive; do
    drop_in=etc/systemd/system/$unit@.service.d
    mkdir $drop_in
    # The guests poll, and would take time from all others.
    printf '%s\n' '[Service]' Nice=19 StandardOutput=append:/var/log/vm StandardError=inherit > $drop_in/lab.conf
done
mount -t proc proc proc
mount -t sysfs sys sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -o rbind /dev dev
mount -t tmpfs -o mode=755 run run
mount -t tmpfs tmp tmp
# As udev does.
chown root:78 dev/kvm
chmod 660 dev/kvm
chmod 666 dev/net/tun
mount --move . /
# As a manager of containers does: credentials are mounted for a service by another process.
exec env -i container=lab PATH=/usr/bin chroot . sh -ec 'mount --make-rshared /
    exec /usr/lib/systemd/systemd --system --unit=multi-user.target --log-target=console --show-status=no'
"#;

/// A running systemd. It is killed with all that it runs when this is dropped.
pub struct Systemd {
    pid: u32,
    _manager: Peer,
}

impl Systemd {
    /// Starts it, and returns once `systemctl` gets answers.
    pub fn start() -> Systemd {
        let programs = lab::vmm_binary();
        let mut command = Command::new("unshare");
        command.args(["--mount", "--pid", "--fork", "sh", "-ec", SETUP, "sh"]);
        command.arg(lab::folder().join("systemd")).arg(programs.parent().expect("a folder of programs")).arg(UNITS);
        let mut manager = Peer::start(command, std::env::temp_dir().join("systemd.log"));
        let of = manager.id();
        let is_up = |pid| inside(pid, &["systemctl", "is-active", "multi-user.target"]).status.success();
        manager.wait_until(|| child(of).is_some_and(is_up));
        Systemd { pid: child(of).expect("systemd runs"), _manager: manager }
    }

    /// A path of its root, as seen from outside.
    pub fn path(&self, path: &str) -> PathBuf {
        Path::new(&format!("/proc/{}/root", self.pid)).join(path.trim_start_matches('/'))
    }

    /// Runs a command in its root, as root.
    pub fn run(&self, command: &[&str]) -> Output {
        inside(self.pid, command)
    }

    /// As [`Self::run`]. Panics with the output and the programs' log if the command fails.
    pub fn ok(&self, command: &[&str]) -> String {
        let output = self.run(command);
        assert!(output.status.success(), "{command:?}: {output:?}\n{}", self.log());
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    /// A property of `unit`.
    pub fn show(&self, unit: &str, property: &str) -> String {
        self.ok(&["systemctl", "show", "--value", "--property", property, unit])
    }

    /// Waits until `unit` is in the state `wanted`, such as `inactive`.
    pub fn wait_until(&self, unit: &str, wanted: &str) {
        let deadline = Instant::now() + LIMIT;
        loop {
            let state = self.show(unit, "ActiveState");
            if state == wanted {
                return;
            }
            assert!(Instant::now() < deadline, "{unit} is {state}, not {wanted}\n{}", self.log());
            thread::sleep(Duration::from_millis(250));
        }
    }

    /// All that VMMs and systemd have printed.
    fn log(&self) -> String {
        let manager = std::env::temp_dir().join("systemd.log");
        let read = |path: &Path| fs::read_to_string(path).unwrap_or_default();
        format!("{}\n{}", read(&self.path("/var/log/vm")), read(&manager))
    }
}

impl Drop for Systemd {
    fn drop(&mut self) {
        // The first process of a namespace takes all others along.
        // SAFETY: kill has no memory effects.
        unsafe { libc::kill(self.pid.cast_signed(), libc::SIGKILL) };
    }
}

/// The only child of the process `pid`.
fn child(pid: u32) -> Option<u32> {
    fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?.trim().parse().ok()
}

fn inside(pid: u32, command: &[&str]) -> Output {
    let pid = pid.to_string();
    let enter = ["-t", &pid, "-m", "-p", "-r", "-w"];
    let output = Command::new("/bin/nsenter").args(enter).args(command).env("PATH", "/usr/bin").output();
    output.expect("nsenter runs")
}
