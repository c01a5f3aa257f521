//! Functions that a guest's kernel passes to the guest's programs, and DPDK as such a program.

use std::time::Duration;

use crate::guest::Guest;

/// Time that testpmd may take to start. It needs 10 s in the nested lab, and much more under load.
const START_LIMIT: Duration = Duration::from_secs(150);
/// File from which testpmd reads commands, and the file to which it writes.
const COMMANDS: &str = "/tmp/testpmd.commands";
const LOG: &str = "/tmp/testpmd.log";
const PROMPT: &str = "testpmd> ";

impl Guest {
    /// Loads the driver of the IOMMU, and those that pass functions to programs.
    pub fn load_vfio(&mut self) {
        for module in ["virtio_iommu", "vfio-pci", "vfio_iommu_type1"] {
            self.load(module);
        }
        // Interrupts of this VMM's functions are not memory writes, so they need not be remapped.
        self.ok("echo 1 > /sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts");
    }

    /// Unbinds the function at `address` from its driver, and passes it to programs.
    pub fn give_to_vfio(&mut self, address: &str) {
        self.unbind(address);
        self.ok(&format!("echo vfio-pci > /sys/bus/pci/devices/{address}/driver_override"));
        self.ok(&format!("echo {address} > /sys/bus/pci/drivers_probe"));
        self.ok(&format!("[ -e /sys/bus/pci/drivers/vfio-pci/{address} ]"));
    }

    /// Returns the function at `address` to virtio-pci.
    pub fn take_from_vfio(&mut self, address: &str) {
        self.return_to("virtio-pci", address);
    }

    /// Returns the function at `address` from programs to `driver`.
    pub fn return_to(&mut self, driver: &str, address: &str) {
        self.unbind(address);
        self.ok(&format!("echo > /sys/bus/pci/devices/{address}/driver_override"));
        self.bind_to(driver, address);
    }
}

/// DPDK's testpmd in a guest.
pub struct GuestTestpmd {
    /// Number of times that it has printed its prompt.
    prompts: usize,
}

impl GuestTestpmd {
    /// Starts testpmd on the functions at `addresses`, which VFIO has, in a guest of 512 MiB with a userland for it.
    /// Starts testpmd, with ports in the order of `addresses`. It does not forward yet.
    pub fn start(guest: &mut Guest, addresses: &[&str]) -> GuestTestpmd {
        // DPDK loads nothing from below a folder that all users may write to.
        guest.ok("chmod 755 / && echo 40 > /proc/sys/vm/nr_hugepages");
        guest.ok(&format!("rm -f {LOG} && : > {COMMANDS}"));
        let functions: String = addresses.iter().map(|address| format!(" -a {address}")).collect();
        let plugins = ["net_virtio", "net_ixgbe", "mempool_ring"].map(|name| format!(" -d /lib/librte_{name}.so.25"));
        let eal = format!("--in-memory --lcores 0@0,1@0 -m 64{}", plugins.concat());
        let own = "-i --total-num-mbufs=2048 --disable-link-check";
        // testpmd polls. At the lowest priority it leaves the guest's only processor to others.
        guest.ok(&format!(
            "(tail -n +1 -f {COMMANDS} | sh -c 'renice 19 $$ > /dev/null; exec dpdk-testpmd {eal}{functions} -- {own}' \
             > {LOG} 2>&1; echo \"ended $?\" >> {LOG}) > /dev/null 2>&1 &"
        ));
        let mut testpmd = GuestTestpmd { prompts: 1 };
        testpmd.await_prompt(guest);
        testpmd
    }

    /// Runs a command in testpmd, and waits until it is done.
    pub fn command(&mut self, guest: &mut Guest, command: &str) {
        guest.ok(&format!("echo '{command}' >> {COMMANDS}"));
        self.prompts += 1;
        self.await_prompt(guest);
    }

    fn await_prompt(&mut self, guest: &mut Guest) {
        let (prompts, limit) = (self.prompts, START_LIMIT.as_secs());
        let found = guest.run_within(
            &format!(
                "n=0; until [ $(grep -o '{PROMPT}' {LOG} | wc -l) -ge {prompts} ]; do \
                 n=$((n + 1)); [ $n -lt {limit} ] && ! grep -q '^ended' {LOG} || {{ cat {LOG}; exit 1; }}; \
                 sleep 1; done"
            ),
            START_LIMIT * 2,
        );
        assert_eq!(found.status, 0, "testpmd does not ask for command {prompts}: {}", found.text);
    }

    /// The total of frames that port `port` has received, in all statistics in testpmd's `log`.
    pub fn received(log: &str, port: usize) -> u64 {
        let title = format!("Forward statistics for port {port} ");
        let count = |text: &str| text.split("RX-packets:").nth(1)?.split_whitespace().next()?.parse::<u64>().ok();
        log.split(&title).skip(1).filter_map(count).sum()
    }

    /// Ends testpmd. Returns its whole output, most of which it writes at its end if that is not a terminal.
    pub fn end(self, guest: &mut Guest) -> String {
        guest.ok(&format!("echo quit >> {COMMANDS}"));
        guest.wait_for("! pidof dpdk-testpmd");
        // `tail` would only end when it next writes to the closed pipe.
        guest.ok("killall tail");
        guest.wait_for(&format!("grep -q '^ended' {LOG}"));
        guest.ok("echo 0 > /proc/sys/vm/nr_hugepages");
        guest.ok(&format!("cat {LOG}"))
    }
}
