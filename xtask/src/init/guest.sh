#!/bin/sh
# The init of a guest of the lab. It loads the drivers, says that it is ready, and then runs one command a line.
#
# Request:  <number> <command>, or `again` to have the last reply once more
# Reply:    @@begin <number> <length of the output in bytes>, the output, @@end <number> <exit status>
# The length shows the other side whether a kernel message got in between.

export PATH=/bin:/usr/bin HOME=/root
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
mkdir -p /dev/pts
# From here on only an emergency is printed on the console: the rest is read with dmesg. What the shell can do itself starts no
# program, which takes some 14 ms in the nested lab of a busy machine.
echo 1 > /proc/sys/kernel/printk
stty -echo -onlcr -icanon min 1 time 0
for module in /modules/*; do
    insmod "$module" || echo "@@failed $module"
done
ip link set lo up

# A guest whose serial port has no interrupt gets its only command from the kernel's command line. It answers by lines of
# the kernel's log that are printed in any case.
if [ -n "$LAB_COMMAND" ]; then
    sh -c "$LAB_COMMAND" 2>&1 < /dev/null | while read -r line; do echo "<0>$line" > /dev/kmsg; done
    poweroff -f
fi

reply() {
    if [ -s /tmp/output ]; then
        echo "@@begin $number $(wc -c < /tmp/output)"
        cat /tmp/output
    else
        echo "@@begin $number 0"
    fi
    echo "@@end $number $status"
}

read -r uptime idle < /proc/uptime
echo "@@ready $uptime"
while read -r number command; do
    if [ "$number" = again ]; then
        number=$last
    else
        sh -c "$command" < /dev/null > /tmp/output 2>&1
        status=$?
        last=$number
    fi
    reply
done
# The console is closed: the test that started this guest has ended.
poweroff -f
