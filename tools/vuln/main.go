// Command vuln looks for known weaknesses in the modules that programs are linked
// with, and in their Go:
//
//	vuln [-db URL] PROGRAM...
//
// It runs govulncheck on each program. The database is that of the Go project,
// https://vuln.go.dev, or the one that GOVULNDB names, as file:///FOLDER. Where it
// cannot be reached, the command says so in one line and succeeds: a machine
// without the Internet can still build. A weakness that a program is affected by
// makes the command fail.
package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/vuln/scan"
)

// patience is how long the database may take to answer the first question.
const patience = 20 * time.Second

func main() {
	db := flag.String("db", cmp.Or(os.Getenv("GOVULNDB"), "https://vuln.go.dev"), "address of the database: https:// or file://")
	flag.Parse()
	if err := run(context.Background(), *db, flag.Args(), os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "vuln:", err)
		os.Exit(1)
	}
}

// run checks the programs. The error lists those that are affected.
func run(ctx context.Context, db string, programs []string, out io.Writer) error {
	if len(programs) == 0 {
		return errors.New("no program is given: name the files to be checked")
	}
	if err := reach(ctx, db); err != nil {
		fmt.Fprintf(out, "vuln: left out, the database cannot be reached: %v\n", err)
		return nil
	}
	var affected []string
	for _, p := range programs {
		report, err := check(ctx, db, p)
		switch {
		case err == nil:
			fmt.Fprintf(out, "vuln: %s: nothing is known\n", filepath.Base(p))
		case report != "":
			fmt.Fprintf(out, "vuln: %s:\n%s\n", filepath.Base(p), report)
			affected = append(affected, filepath.Base(p))
		default:
			return fmt.Errorf("%s: %w", p, err)
		}
	}
	if len(affected) > 0 {
		return fmt.Errorf("affected: %s; take newer versions of these modules", strings.Join(affected, ", "))
	}
	return nil
}

// affectedCode is the exit code of govulncheck for a program with a weakness.
const affectedCode = 3

// check runs govulncheck on one program. The report is empty unless the program is
// affected.
func check(ctx context.Context, db, program string) (report string, err error) {
	if _, err := os.Stat(program); err != nil {
		return "", err
	}
	var text, problems bytes.Buffer
	cmd := scan.Command(ctx, "-mode=binary", "-db="+db, program)
	cmd.Stdout, cmd.Stderr = &text, &problems
	if err := cmd.Start(); err != nil {
		return "", err
	}
	err = cmd.Wait()
	var code interface{ ExitCode() int }
	if errors.As(err, &code) && code.ExitCode() == affectedCode {
		return text.String(), err
	}
	if err != nil {
		return "", fmt.Errorf("govulncheck: %w: %s", err, strings.TrimSpace(problems.String()))
	}
	return "", nil
}

// reach returns an error where the database does not answer.
func reach(ctx context.Context, db string) error {
	if dir, ok := strings.CutPrefix(db, "file://"); ok {
		_, err := os.Stat(filepath.Join(dir, "index", "db.json"))
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimSuffix(db, "/")+"/index/db.json", nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answers %s", db, resp.Status)
	}
	_, err = io.Copy(io.Discard, resp.Body)
	return err
}
