//! A guest that replaces its own kernel.

use std::fs;
use std::io::Write;
use std::net::TcpStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use crate::guest::Guest;
use crate::host::tap::Subnet;
use crate::lab::{self, Image, Kernel};

/// The guest's port for receiving a file.
const PORT: u16 = 5000;
/// Time that the guest may take to listen there, and to receive the file.
const TRANSFER_LIMIT: Duration = Duration::from_secs(60);

impl Guest {
    /// Boots `kernel` and its initramfs from the running kernel with kexec, with the same command line, and waits until
    /// it is up. Panics if the guest restarted in another way, such as through a panic. `program` is this crate's
    /// static binary `kexec`; it and the kernel are sent to the guest over the NIC in `subnet`.
    pub fn kexec(&mut self, program: &Path, kernel: Kernel, subnet: Subnet) {
        self.kexec_with(program, kernel, lab::Userland::Plain, subnet);
    }

    /// As [`Self::kexec`], with an initramfs of `userland`.
    pub fn kexec_with(&mut self, program: &Path, kernel: Kernel, userland: lab::Userland, subnet: Subnet) {
        self.take_file(program, "/tmp/kexec", subnet);
        self.take_file(&lab::kernel_file(kernel, Image::BzImage), "/tmp/kernel", subnet);
        self.take_file(&lab::initramfs(kernel, userland), "/tmp/initramfs", subnet);
        self.ok("chmod +x /tmp/kexec && /tmp/kexec /tmp/kernel /tmp/initramfs \"$(cat /proc/cmdline) by-kexec\"");
        self.restart_by("/tmp/kexec");
        self.ok("grep -q by-kexec /proc/cmdline");
    }

    /// Copies a file from the host into the guest.
    fn take_file(&mut self, source: &Path, target: &str, subnet: Subnet) {
        let contents = fs::read(source).unwrap_or_else(|error| panic!("{}: {error}", source.display()));
        self.ok(&format!("nc -l -p {PORT} > {target} 2> /dev/null < /dev/null &"));
        let deadline = Instant::now() + TRANSFER_LIMIT;
        let mut stream = loop {
            match TcpStream::connect_timeout(&(subnet.guest(), PORT).into(), TRANSFER_LIMIT) {
                Ok(stream) => break stream,
                Err(error) => assert!(Instant::now() < deadline, "the guest accepts no connection: {error}"),
            }
            thread::sleep(Duration::from_millis(20));
        };
        stream.set_write_timeout(Some(TRANSFER_LIMIT)).expect("a timeout above 0 is valid");
        stream.write_all(&contents).expect("the guest receives the file");
        drop(stream);
        self.wait_for(&format!("[ $(wc -c < {target}) -eq {} ]", contents.len()));
    }
}
