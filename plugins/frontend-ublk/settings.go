package main

import (
	"fmt"
	"math"
	"strconv"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// deviceSettings are the settings of a device.
type deviceSettings struct {
	number   uint32 // the N of /dev/ublkbN
	queues   int    // the most hardware queues that it may have
	zeroCopy bool   // use registered pages, see pages.go
}

// parseSettings parses the settings of a device. The error wraps EINVAL if a setting or
// its value does not exist.
func parseSettings(words map[string]string) (deviceSettings, error) {
	s := deviceSettings{number: anyDevice, queues: math.MaxInt}
	for k, v := range words {
		if err := s.setSetting(k, v); err != nil {
			return deviceSettings{}, err
		}
	}
	return s, nil
}

func (s *deviceSettings) setSetting(k, v string) error {
	n, err := strconv.ParseUint(v, 10, 20)
	switch k {
	case "number":
		if err != nil {
			return fmt.Errorf("setting number %q: want the N of /dev/ublkbN: %w", v, blk.EINVAL)
		}
		s.number = uint32(n)
	case "queues":
		if err != nil || n == 0 {
			return fmt.Errorf("setting queues %q: want a number from 1 up: %w", v, blk.EINVAL)
		}
		s.queues = int(n)
	case "zero_copy":
		if s.zeroCopy = v == "yes"; !s.zeroCopy && v != "no" {
			return fmt.Errorf("setting zero_copy %q: want yes or no: %w", v, blk.EINVAL)
		}
	default:
		return fmt.Errorf("there is no setting %q of a ublk device, only number, queues and zero_copy: %w", k, blk.EINVAL)
	}
	return nil
}
