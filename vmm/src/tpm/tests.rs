//! A TPM over Debian's swtpm, as a guest uses it.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::*;

/// Limit of each wait on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// An swtpm with its own state, killed on drop.
struct Process {
    folder: tempfile::TempDir,
    child: Child,
}

impl Process {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let child = Self::spawn(folder.path());
        Self { folder, child }
    }

    fn spawn(folder: &Path) -> Child {
        let mut command = Command::new("swtpm");
        command.args(["socket", "--tpm2", "--tpmstate"]).arg(format!("dir={}", folder.display()));
        command.arg("--ctrl").arg(format!("type=unixio,path={}", folder.join("socket").display()));
        let child = command.stdin(Stdio::null()).spawn().expect("swtpm is needed: apt-get install swtpm");
        let begin = Instant::now();
        // The file exists before swtpm listens, which the flag __SO_ACCEPTCON shows (`proc_net(5)`).
        let path = folder.join("socket").display().to_string();
        let listens = || {
            let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
            sockets.lines().any(|line| line.ends_with(&path) && line.split_whitespace().nth(3) == Some("00010000"))
        };
        while !listens() {
            assert!(begin.elapsed() < PATIENCE, "swtpm does not listen");
            std::thread::sleep(Duration::from_millis(5));
        }
        child
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    fn restart(&mut self) {
        self.kill();
        let _ = std::fs::remove_file(self.socket());
        self.child = Self::spawn(self.folder.path());
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Handler of all other addresses, where there is nothing.
struct Nothing;

impl MmioHandler for Nothing {
    fn read(&self, _address: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn write(&self, _address: u64, _data: &[u8]) {}
}

struct Guest(Arc<dyn MmioHandler>);

impl Guest {
    fn read(&self, offset: u64) -> u32 {
        let mut data = [0; 4];
        self.0.read(layout::TPM.start + offset, &mut data);
        u32::from_le_bytes(data)
    }

    fn write(&self, offset: u64, value: u32) {
        self.0.write(layout::TPM.start + offset, &value.to_le_bytes());
    }

    /// Executes a command as Linux's driver does, and returns the response.
    fn run(&self, command: &[u8]) -> Vec<u8> {
        self.write(0x08, 1);
        self.write(0x40, 1);
        (0x80..).zip(command).for_each(|(at, byte)| self.0.write(layout::TPM.start + at, &[*byte]));
        self.write(0x4c, 1);
        let begin = Instant::now();
        while self.read(0x4c) != 0 {
            assert!(begin.elapsed() < PATIENCE, "the command does not end");
            std::thread::sleep(Duration::from_millis(1));
        }
        let byte = |at: u64| {
            let mut data = [0];
            self.0.read(layout::TPM.start + 0x80 + at, &mut data);
            data[0]
        };
        let size = u32::from_be_bytes([2, 3, 4, 5].map(byte));
        (0..u64::from(size)).map(byte).collect()
    }

    /// Executes a command and returns the response code.
    fn code(&self, command: &[u8]) -> u32 {
        u32::from_be_bytes(self.run(command)[6..10].try_into().unwrap())
    }
}

/// TPM2_Startup with TPM_SU_CLEAR.
const STARTUP: &[u8] = &[0x80, 0x01, 0, 0, 0, 12, 0, 0, 0x01, 0x44, 0, 0];
/// TPM2_GetRandom of 16 bytes.
const RANDOM: &[u8] = &[0x80, 0x01, 0, 0, 0, 12, 0, 0, 0x01, 0x7b, 0, 16];
/// TPM_RC_INITIALIZE.
const INITIALIZE: u32 = 0x100;

#[test]
fn a_guest_starts_its_tpm_and_gets_random_bytes() {
    let process = Process::start();
    let tpm = Tpm::open(&process.socket()).unwrap();
    let guest = Guest(tpm.over(Arc::new(Nothing)));
    assert_eq!(guest.code(STARTUP), 0);
    let [first, second] = [guest.run(RANDOM), guest.run(RANDOM)];
    assert_eq!((first.len(), &first[6..12]), (28, &[0, 0, 0, 0, 0, 16][..]));
    assert_ne!(first[12..], second[12..]);
    // The TPM has been started; after a reset it has not.
    assert_eq!(guest.code(STARTUP), INITIALIZE);
    tpm.reset();
    assert_eq!(guest.code(RANDOM), INITIALIZE);
    assert_eq!(guest.code(STARTUP), 0);
    let mut elsewhere = [0; 4];
    guest.0.read(layout::TPM.end, &mut elsewhere);
    assert_eq!(elsewhere, [0xff; 4]);
}

#[test]
fn lost_tpm_fails_until_a_machine_reset_finds_it_again() {
    let mut process = Process::start();
    let tpm = Tpm::open(&process.socket()).unwrap();
    let guest = Guest(tpm.over(Arc::new(Nothing)));
    assert_eq!(guest.code(STARTUP), 0);
    process.restart();
    for _ in 0..2 {
        assert_eq!(guest.code(RANDOM), 0x101);
        assert_eq!(guest.read(0x44) & 1, 1, "a fatal error");
    }
    tpm.reset();
    assert_eq!(guest.code(STARTUP), 0);
    assert_eq!((guest.code(RANDOM), guest.read(0x44) & 1), (0, 0));
}

#[test]
fn a_vm_does_not_start_without_its_swtpm() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let said = Tpm::open(&path).err().unwrap().to_string();
    assert!(said.contains("cannot be connected to: No such file") && said.contains("swtpm socket --tpm2"), "{said}");
    // Not an swtpm.
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let other = std::thread::spawn(move || drop(listener.accept().unwrap()));
    let said = Tpm::open(&path).err().unwrap().to_string();
    assert!(said.contains("cannot ask swtpm what it can do: "), "{said}");
    other.join().unwrap();
}
