package access

import (
	"fmt"
	"strings"
)

// Limits of a rule hold for all its clients together. 0 is no limit.
type Limits struct {
	Sessions   int   `yaml:"sessions"`         // with a device open by the rule
	Devices    int   `yaml:"devices"`          // open by the rule, of all sessions
	QueueDepth int   `yaml:"queue-depth"`      // requests of these devices in the storage plugin
	IOPS       int64 `yaml:"iops"`             // requests in a second
	IOPSBurst  int64 `yaml:"iops-burst"`       // requests at once after a pause; 0: a tenth of IOPS
	Bytes      int64 `yaml:"bytes-per-second"` // read and written
	BytesBurst int64 `yaml:"bytes-burst"`      // bytes at once after a pause; 0: a tenth of Bytes
}

// maxRate bounds IOPS and Bytes. A request costs 1 ns at least.
const maxRate = 1e9 * 1024

// limitField is one field of Limits, by its name in the configuration.
type limitField struct {
	name  string
	value int64
}

func (l *Limits) fields() []limitField {
	return []limitField{
		{"sessions", int64(l.Sessions)}, {"devices", int64(l.Devices)}, {"queue-depth", int64(l.QueueDepth)},
		{"iops", l.IOPS}, {"iops-burst", l.IOPSBurst}, {"bytes-per-second", l.Bytes}, {"bytes-burst", l.BytesBurst},
	}
}

// Check returns the field that cannot be, by its name in the configuration.
func (l *Limits) Check() (field string, err error) {
	for _, f := range l.fields() {
		if f.value < 0 || f.value > maxRate {
			return f.name, fmt.Errorf("%s: %d is not between 0 and %d", f.name, f.value, int64(maxRate))
		}
	}
	switch {
	case l.IOPS > 1e9:
		return "iops", fmt.Errorf("iops: %d is more than %d", l.IOPS, int64(1e9))
	case l.IOPSBurst > 0 && l.IOPS == 0:
		return "iops-burst", fmt.Errorf("iops-burst: %d is of no use without iops", l.IOPSBurst)
	case l.BytesBurst > 0 && l.Bytes == 0:
		return "bytes-burst", fmt.Errorf("bytes-burst: %d is of no use without bytes-per-second", l.BytesBurst)
	}
	return "", nil
}

// Paces reports whether the limits hold up requests.
func (l *Limits) Paces() bool { return l.QueueDepth > 0 || l.IOPS > 0 || l.Bytes > 0 }

// String returns the limits that there are, as in the configuration, in one line.
func (l *Limits) String() string {
	var list []string
	for _, f := range l.fields() {
		if f.value != 0 {
			list = append(list, fmt.Sprintf("%s: %d", f.name, f.value))
		}
	}
	return strings.Join(list, ", ")
}
